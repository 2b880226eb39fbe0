"""`Samples`: rows of different lengths, laid end to end. Padding is an attention backend's business."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint16] | NDArray[np.uint32]


@dataclass(frozen=True)
class Samples:
    """N rows of training data with T tokens and M targets in all.

    Attributes:
        tokens: [T] uint16 or uint32, the rows' input ids after masking, row after row, special ones included.
        offsets: [N + 1] int64, row i is tokens[offsets[i]:offsets[i + 1]].
        target_positions: [M] int64, sorted flat indices into `tokens` that the model must predict.
        target_ids: [M] same dtype as tokens, the original ids there.
        segment_starts: [N] int32, where the second segment begins inside its row; the row's length if it
            has none. None for single-segment inputs.
        pair_label: [N] int8, the sentence-pair label (NSP, SOP); None without pairs.
        order: [T] int32, factorisation order within the row (permuted LM); None otherwise. A token's content may
            use tokens of no higher number, its prediction only those of lower number.
        reversed_rows: [N] bool, rows whose text is laid out from last token to first; None where none can be.
        text_starts: [N, G] int32, where each of the G texts of an example begins inside its row, the first at 0; each
            has special tokens of its own. None where a row is no example of several texts.
        cls_last: [N] bool, rows whose texts end with their classification token (XLNet); None where texts begin with
            it, or rows are no examples.
    """

    tokens: Tokens
    offsets: NDArray[np.int64]
    target_positions: NDArray[np.int64]
    target_ids: Tokens
    segment_starts: NDArray[np.int32] | None = None
    pair_label: NDArray[np.int8] | None = None
    order: NDArray[np.int32] | None = None
    reversed_rows: NDArray[np.bool_] | None = None
    text_starts: NDArray[np.int32] | None = None
    cls_last: NDArray[np.bool_] | None = None

    @property
    def rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        """Of all arrays."""
        arrays = (getattr(self, field.name) for field in fields(self))
        return sum(array.nbytes for array in arrays if array is not None)
