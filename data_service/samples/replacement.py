"""Replacement of targets by the mask token, a random token, or the token itself.

Replacement of whole words by similar words has its own file (`similar_words.py`); `masking.py` uses it if the share
`Replacement.similar` is above 0.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import model_validator

from data_service.formats import GrowingRecord
from data_service.rng import UINT32_RANGE, scale_draws
from data_service.types import Share, Tokens


class Replacement(GrowingRecord):
    """The shares of targets that are replaced in each way. All shares add up to 1.

    Attributes:
        mask: share replaced by the mask token.
        random: share replaced by a random token.
        keep: share that is not changed.
        similar: share of words replaced by a similar word (MacBERT). If it is above 0, all shares are shares of words,
            and random words come from the table of similar words.
        random_from: how random tokens are drawn: "vocabulary": uniformly from all that are not special; "unigram": by
            their frequency in the corpora (SpanBERT).
    """

    later_fields: ClassVar = ("similar",)

    mask: Share = 0.8
    random: Share = 0.1
    keep: Share = 0.1
    similar: Share = 0.0
    random_from: Literal["vocabulary", "unigram"] = "vocabulary"

    @model_validator(mode="after")
    def _check_shares(self) -> Self:
        shares = {"mask": self.mask, "random": self.random, "keep": self.keep, **self.word_shares}
        if abs(sum(shares.values()) - 1) > 1e-9:
            raise ValueError(f"{' + '.join(shares)} is {sum(shares.values()):g}, but must be 1")
        if self.similar and self.random_from == "unigram":
            raise ValueError("random words come from the table of similar words; leave random_from out")
        if self.random_from == "unigram" and not self.random:
            raise ValueError("random_from is given but random is 0; leave random_from out")
        return self

    @property
    def word_shares(self) -> dict[str, float]:
        """The shares above 0 of replacements of whole words, by name; currently only `similar`."""
        return {"similar": self.similar} if self.similar else {}


@dataclass(frozen=True)
class Vocabulary:
    """The ids that may replace targets.

    Attributes:
        mask: id of the mask token.
        ordinary: [V], ascending ids of the tokens that are not special, in the corpus's dtype. Random replacements are
            drawn from them.
        counts: [V] int64, number of occurrences of each ordinary token in the corpora; None: draw uniformly.
    """

    mask: int
    ordinary: Tokens
    counts: NDArray[np.int64] | None = None

    def draw_ids(self, draws: NDArray[np.uint32]) -> Tokens:
        """Return [N] random ordinary ids for [N] uniform 32-bit draws: by frequency if `counts` is given, else uniform.

        Frequencies are rounded to multiples of 2**-32.
        """
        if self.counts is None:
            return self.ordinary[scale_draws(draws, len(self.ordinary))]
        upper = np.cumsum(self.counts)
        edges = np.floor(upper[:-1] / upper[-1] * UINT32_RANGE).astype(np.int64)
        return self.ordinary[np.searchsorted(edges, draws.astype(np.int64), side="right")]


def replace_targets(
    target_ids: Tokens,
    draws: NDArray[np.uint64],
    first_target_of_run: NDArray[np.int64] | None,
    replace: Replacement,
    vocabulary: Vocabulary,
) -> Tokens:
    """Return [M], the ids that replace the targets.

    Args:
        target_ids: [M], ids of the targets.
        draws: [M] uniform 64-bit draws. The upper half decides how a target is replaced, the lower half its random id.
        first_target_of_run: [M], for each target the index of the target whose draw decides how it is replaced; None:
            its own draw.
    """
    action = draws >> np.uint64(32)
    if first_target_of_run is not None:
        action = action[first_target_of_run]
    masked = action < round(replace.mask * UINT32_RANGE)
    randomised = np.flatnonzero(~masked & (action < round((replace.mask + replace.random) * UINT32_RANGE)))
    ids = target_ids.copy()
    ids[masked] = vocabulary.mask
    ids[randomised] = vocabulary.draw_ids(draws[randomised].astype(np.uint32))
    return ids
