"""Targets of next-token prediction: no token is replaced, and nearly every token is predicted from those before it.

All tokens of the text are targets, except the first of a row and the first after a separator, which begins a document
or a second segment: no token of the same text precedes them. Special tokens are never targets: where a row ends depends
on its length, not on the text.

There are no random draws, so all epochs have the same rows. Rows are marked as causal (`Samples.causal`), which tells
the model's attention to hide later tokens from each token. Of several documents in a row, later ones see earlier ones,
as with masking.
"""

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_service.samples.masking import DeterministicMasking
from data_service.samples.packing import LaidOutRows
from data_service.samples.samples import Samples


class NextToken(DeterministicMasking):
    """Next-token prediction (Radford et al., 2018, section 3.1), for encoders as in Gisserot-Boukhlef et al. (2025,
    arXiv 2507.00994).
    """

    kind: Literal["clm"] = "clm"

    def expected_target_count(self, length: int, maskable: int) -> float:
        """Return the number of targets in a row of one document. `maskable`: number of tokens that are not special."""
        return float(max(0, maskable - 1))

    def max_target_count(self, tokens: int) -> float:
        """Return the largest possible number of targets in a row of `tokens` tokens."""
        return float(tokens)


def next_token_samples(rows: LaidOutRows, excluded_offsets: NDArray[np.int64]) -> Samples:
    """Return the rows with their targets. `excluded_offsets`: offsets in the text of tokens that are never targets."""
    follows = np.ones(int(rows.edges[-1]), dtype=np.bool_)
    for without in (rows.edges[:-1], rows.separators, excluded_offsets):
        follows[without] = False
    positions = rows.marked_token_indices(follows)
    causal = np.ones(len(rows.offsets) - 1, dtype=np.bool_)
    return Samples(rows.tokens, rows.offsets, positions, rows.tokens[positions], causal=causal)
