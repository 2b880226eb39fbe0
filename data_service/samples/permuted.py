"""Permuted language modelling: which tokens are predicted, and in what order (Yang et al. 2019)."""

from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveInt


class PermutedPrediction(BaseModel):
    """Targets and factorisation order of a row (zihangdai/xlnet, data_utils.py).

    Attributes:
        predict: targets of a row, half of them (rounded up) in its first part.
        context, chosen: n * context / chosen tokens around an n-gram are not predicted (alpha 6, beta 1).
        longest: longest n-gram; n is drawn with probability proportional to 1 / n.
        unit: what an n-gram counts: whole words (the paper), or pieces from a word's start on (the official code).
        permutation: tokens that are permuted together; those of a later group come after them.
        copies: "dynamic" draws anew every epoch; a number k draws k times, used in turn.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["plm"] = "plm"
    predict: PositiveInt = 85
    context: PositiveInt = 6
    chosen: PositiveInt = 1
    longest: PositiveInt = 5
    unit: Literal["whole_word", "piece"] = "whole_word"
    permutation: PositiveInt = 256
    copies: Literal["dynamic"] | PositiveInt = Field(default="dynamic")

    def mask_epoch(self, epoch: int) -> int:
        """The epoch whose draws are used in `epoch`."""
        return epoch if self.copies == "dynamic" else epoch % self.copies

    @property
    def goals(self) -> tuple[int, int]:
        """Targets of a row's two parts."""
        return self.predict - self.predict // 2, self.predict // 2


def factorisation_order(
    ordered: NDArray[np.bool_], keys: NDArray[np.uint32], reuse: int, permutation: int
) -> NDArray[np.int32]:
    """[N, L] int32: as numbers, exactly what zihangdai/xlnet, data_utils.py, `_local_perm` lets each token see.

    A row has two parts, the first of `reuse` tokens. Of each part the tokens that are neither targets nor functional
    come first, together: they see each other and all of the part before. Then come its targets and functional tokens,
    one after another in random order. So the first part sees nothing of the second.

    Args:
        ordered: [N, L] bool: targets, `<sep>` and `<cls>`.
        keys: [N, L] random numbers.
        reuse: tokens of the first part.
        permutation: how many tokens of a part are permuted together. (The official code permutes all such groups of a
            part alike, here each has an order of its own; at the published sizes a part is one group.)
    """
    first = _ranks(ordered[:, :reuse], keys[:, :reuse], permutation)
    second = _ranks(ordered[:, reuse:], keys[:, reuse:], permutation)
    return np.concatenate([first, first.max(axis=1, keepdims=True) + 1 + second], axis=1)


def _ranks(ordered: NDArray[np.bool_], keys: NDArray[np.uint32], permutation: int) -> NDArray[np.int32]:
    """[N, P] int32: the `ordered` tokens of each row numbered from 1 by group and key, the others 0."""
    rows, columns = np.nonzero(ordered)
    counts = ordered.sum(axis=1)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    # Group, key and column in one number: sorted by value, so that equal keys have one order on every machine.
    keyed = ((columns // permutation) << 48).view(np.uint64) | (
        keys[ordered].astype(np.uint64) << np.uint64(16)
    )
    places = np.full((len(ordered), int(counts.max(initial=0))), np.iinfo(np.uint64).max)
    places[rows, within] = keyed | columns.view(np.uint64)
    places.sort(axis=1)
    ranks = np.zeros(ordered.shape, dtype=np.int32)
    ranks[rows, (places[rows, within] & np.uint64(0xFFFF)).view(np.int64)] = within + 1
    return ranks
