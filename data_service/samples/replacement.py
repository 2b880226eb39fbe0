"""What stands where a target was: the mask token, a random token, or the token itself.

A rule that replaces whole words by something else is a file of its own (`similar_words.py`), and has a share here.
`masking.py` calls the rule that has one above 0.
"""

from dataclasses import dataclass
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from data_service.rng import scale
from data_service.types import Share, Tokens

_DRAWS = 1 << 32
_OF_WORDS = ("similar",)  # shares that came later: left out where they are 0


class Replacement(BaseModel):
    """What stands where a target was: shares of the mask token, a random token, the token itself; sum 1.

    A random token is any ordinary one alike, or drawn by its frequency in the corpora (SpanBERT). `similar`: the share
    of words in whose place a similar one stands (MacBERT); all shares are then of words, and a random word is one of
    the table of similar words.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    mask: Share = 0.8
    random: Share = 0.1
    keep: Share = 0.1
    similar: Share = 0.0
    random_from: Literal["vocabulary", "unigram"] = "vocabulary"

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        shares = {"mask": self.mask, "random": self.random, "keep": self.keep, **self.of_words}
        if abs(sum(shares.values()) - 1) > 1e-9:
            raise ValueError(f"{' + '.join(shares)} is {sum(shares.values()):g}, it must be 1")
        if self.similar and self.random_from == "unigram":
            raise ValueError("random words are of the table of similar words; leave random_from out")
        if self.random_from == "unigram" and not self.random:
            raise ValueError("random_from is given but random is 0; leave random_from out")
        return self

    @model_serializer(mode="wrap")
    def _as_before(self, serialize: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Without the shares that came later where they are 0."""
        return {name: value for name, value in serialize(self).items() if name not in _OF_WORDS or value}

    @property
    def of_words(self) -> dict[str, float]:
        """The shares above 0 of rules that replace whole words; all shares are then of words."""
        return {name: share for name in _OF_WORDS if (share := getattr(self, name))}


@dataclass(frozen=True)
class Vocabulary:
    """The ids that masking writes.

    Attributes:
        mask: the id of the mask token.
        ordinary: [V] ids of ordinary tokens, ascending, in the corpus's dtype: the random replacements.
        counts: [V] int64, how often each occurs in the corpora; None where all are drawn alike.
    """

    mask: int
    ordinary: Tokens
    counts: NDArray[np.int64] | None = None

    def random(self, draws: NDArray[np.uint32]) -> Tokens:
        """Return [N] ordinary ids from [N] uniform 32-bit draws: by frequency if counts are given, else all alike.

        Frequencies are rounded to multiples of 2**-32.
        """
        if self.counts is None:
            return self.ordinary[scale(draws, len(self.ordinary))]
        upper = np.cumsum(self.counts)
        edges = np.floor(upper[:-1] / upper[-1] * _DRAWS).astype(np.int64)
        return self.ordinary[np.searchsorted(edges, draws.astype(np.int64), side="right")]


def replaced(
    target_ids: Tokens,
    draws: NDArray[np.uint64],
    leaders: NDArray[np.int64] | None,
    replace: Replacement,
    vocabulary: Vocabulary,
) -> Tokens:
    """Return [M] what stands in place of the targets.

    Args:
        target_ids: [M] the targets.
        draws: [M] uniform 64-bit draws: the upper half says what happens to a target, the lower is its random id.
        leaders: [M] for each target the one whose draw decides what happens to it; None if each has its own.
        replace, vocabulary: see there.
    """
    action = draws >> np.uint64(32)
    if leaders is not None:
        action = action[leaders]
    masked = action < round(replace.mask * _DRAWS)
    randomised = np.flatnonzero(~masked & (action < round((replace.mask + replace.random) * _DRAWS)))
    ids = target_ids.copy()
    ids[masked] = vocabulary.mask
    ids[randomised] = vocabulary.random(draws[randomised].astype(np.uint32))
    return ids
