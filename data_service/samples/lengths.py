"""How many words a masked stretch of text has: the distributions that the n-gram and span schemes draw from."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_DRAWS = 1 << 32


@dataclass(frozen=True)
class Lengths:
    """A distribution over 1 to L words.

    Attributes:
        edges: [L - 1] uint32, ascending; a uniform 32-bit draw below edges[0] means 1, below edges[1] means 2...
    """

    edges: NDArray[np.uint32]

    @classmethod
    def weighted(cls, weights: NDArray[np.float64]) -> "Lengths":
        """Of n words with probability proportional to weights[n - 1] (positive)."""
        # Sums and one division only, which every machine rounds alike: the same draws mean the same lengths.
        upper = np.cumsum(weights)
        return cls(np.rint(upper[:-1] / upper[-1] * _DRAWS).clip(0, _DRAWS - 1).astype(np.uint32))

    @property
    def longest(self) -> int:
        return len(self.edges) + 1

    def of(self, draws: NDArray[np.uint32]) -> NDArray[np.int64]:
        """[N] int64 lengths from [N] uniform 32-bit draws."""
        return np.searchsorted(self.edges, draws, side="right") + 1


def ngram_lengths(longest: int) -> Lengths:
    """p(n) proportional to 1 / n for n up to `longest` (Lan et al. 2019, section 3.1)."""
    return Lengths.weighted(1 / np.arange(1, longest + 1))


def span_lengths(p: float, longest: int) -> Lengths:
    """Geometric(p) cut off after `longest` and renormalised (Joshi et al. 2020, section 3.1)."""
    return Lengths.weighted(np.cumprod(np.append(p, np.full(longest - 1, 1 - p))))
