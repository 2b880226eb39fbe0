"""How a cloud of N vectors in n dimensions is spread: mean cosine, IsoScore, effective rank, whitening.

A diagnosis, not an objective. A cosine ignores how long vectors are, so normalising them changes none of it; and less
isotropy can serve a task better (2305.19358, 2402.03191).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_NULL = 1e-9  # of the largest variance: a direction with less has none


def mean_cosine(points: NDArray[np.floating]) -> float:
    """The mean cosine of all pairs of different vectors: what a random pair has on average, in [-1, 1].

    By the length of their sum, so without drawing pairs. A vector of length 0 has cosine 0 with every other. NaN for
    fewer than two vectors.
    """
    if len(points) < 2:
        return math.nan
    cloud = points.astype(np.float64)
    lengths = np.linalg.norm(cloud, axis=1, keepdims=True)
    units = np.divide(cloud, lengths, out=np.zeros_like(cloud), where=lengths > 0)
    itself = float((lengths > 0).sum())
    return float((np.square(units.sum(0)).sum() - itself) / (len(points) * (len(points) - 1)))


def iso_score(points: NDArray[np.floating]) -> float:
    """IsoScore (Rudman et al. 2022, 2108.07344, algorithm 1), from 0 (a line) to 1 (equal variance in all directions).

    It grows linearly with the number of directions that are used alike, and changes neither when the cloud is moved,
    turned, nor when it is scaled. Of N vectors at most N - 1 directions can be used, so N should be several times n.
    NaN for fewer than two vectors or dimensions, or if all vectors are the same.
    """
    dimensions = points.shape[1]
    if len(points) < 2 or dimensions < 2:
        return math.nan
    variances, _ = _principal(points.astype(np.float64))  # steps 1 to 3: covariance after PCA
    length = float(np.linalg.norm(variances))
    if length == 0:
        return math.nan
    normed = math.sqrt(dimensions) * variances / length  # step 4
    defect = float(np.linalg.norm(normed - 1)) / math.sqrt(2 * (dimensions - math.sqrt(dimensions)))  # step 5
    used = (dimensions - defect**2 * (dimensions - math.sqrt(dimensions))) ** 2 / dimensions**2  # step 6
    return float((dimensions * used - 1) / (dimensions - 1))  # step 7


def effective_rank(points: NDArray[np.floating]) -> float:
    """exp of the entropy of the singular values' shares (Roy & Vetterli 2007), from 1 to the rank.

    Of the vectors as they are: what they have in common counts, as it does in a cosine. NaN if all are zero.
    """
    values = np.linalg.svd(points.astype(np.float64), compute_uv=False)
    total = float(values.sum())
    if total == 0:
        return math.nan
    shares = values[values > 0] / total
    return float(math.exp(-(shares * np.log(shares)).sum()))


@dataclass(frozen=True)
class Whitening:
    """Vectors to coordinates with mean 0 and covariance 1, as of those that it was fitted on (Su et al. 2021,
    2103.15316).

    Attributes:
        mean: [n].
        matrix: [n, k], k directions in which there was variance.
    """

    mean: Floats
    matrix: Floats

    @classmethod
    def fit(cls, points: NDArray[np.floating]) -> "Whitening":
        """To at least one vector [N, n]."""
        cloud = points.astype(np.float64)
        variances, directions = _principal(cloud)
        some = variances > _NULL * variances.max(initial=0.0)
        return cls(cloud.mean(0), directions[:, some] / np.sqrt(variances[some]))

    def __call__(self, points: NDArray[np.floating]) -> Floats:
        """[N, k]."""
        white: Floats = (points.astype(np.float64) - self.mean) @ self.matrix
        return white


def _principal(cloud: Floats) -> tuple[Floats, Floats]:
    """[n] variances along the principal directions, and those, [n, n], a column each."""
    centred = cloud - cloud.mean(0)
    variances, directions = np.linalg.eigh(centred.T @ centred / max(len(cloud) - 1, 1))
    return np.maximum(variances, 0.0), directions
