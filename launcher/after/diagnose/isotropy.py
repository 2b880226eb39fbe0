"""Isotropy: how a cloud of N vectors in n dimensions is spread, by mean cosine, IsoScore and effective rank; layer by
layer and pooling by pooling, raw and whitened.

Encoders put all vectors into a narrow cone: texts that have nothing to do with each other have cosines near 1
(Ethayarajh 2019). The figures diagnose that and are no objective: a cosine ignores how long vectors are, so normalising
them changes none of it, and less isotropy can serve a task better (2305.19358, 2402.03191). Whitening is fitted on
every second text and measured on the others, like everything else here. On its own texts it would be perfect by
construction.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_service.stream.sources import Corpora
from launcher.after.diagnose.states import FrozenEncoder, Row, pooled_states, token_rows
from launcher.errors import RunError
from launcher.runtime.recipe.evaluation import Pooling
from launcher.runtime.run.evaluations import Figure, Form
from launcher.runtime.run.record import Run
from launcher.runtime.run.streams import heldout_spec

Floats = NDArray[np.float64]

_MIN_VARIANCE_SHARE = 1e-9  # share of the largest variance; a direction with less counts as having none


def mean_cosine(points: NDArray[np.floating]) -> float:
    """Return the mean cosine of all pairs of different vectors: what a random pair has on average, in [-1, 1].

    It follows from the length of the sum of the unit vectors, so no pairs are drawn. A vector of length 0 has cosine 0
    with every other. The result is NaN for fewer than two vectors.
    """
    if len(points) < 2:
        return math.nan
    cloud = points.astype(np.float64)
    lengths = np.linalg.norm(cloud, axis=1, keepdims=True)
    units = np.divide(cloud, lengths, out=np.zeros_like(cloud), where=lengths > 0)
    itself = float((lengths > 0).sum())
    return float((np.square(units.sum(0)).sum() - itself) / (len(points) * (len(points) - 1)))


def iso_score(points: NDArray[np.floating]) -> float:
    """Return the IsoScore (Rudman et al. 2022, 2108.07344, algorithm 1), from 0 (a line) to 1 (equal variance in all
    directions).

    It grows linearly with the number of directions of equal variance. It does not change if the cloud is moved, rotated
    or scaled. N vectors have variance in at most N - 1 directions, so N should be several times n. The result is NaN
    for fewer than two vectors or dimensions, or if all vectors are equal.
    """
    dimensions = points.shape[1]
    if len(points) < 2 or dimensions < 2:
        return math.nan
    variances, _ = _principal_axes(points.astype(np.float64))  # steps 1 to 3: covariance after PCA
    length = float(np.linalg.norm(variances))
    if length == 0:
        return math.nan
    normed = math.sqrt(dimensions) * variances / length  # step 4
    defect = float(np.linalg.norm(normed - 1)) / math.sqrt(2 * (dimensions - math.sqrt(dimensions)))  # step 5
    used = (dimensions - defect**2 * (dimensions - math.sqrt(dimensions))) ** 2 / dimensions**2  # step 6
    return float((dimensions * used - 1) / (dimensions - 1))  # step 7


def effective_rank(points: NDArray[np.floating]) -> float:
    """Return the effective rank: exp of the entropy of the singular values' shares (Roy & Vetterli 2007), from 1 to the
    rank.

    The vectors are not centred, so their mean counts, as it does in a cosine. The result is NaN if all are zero.
    """
    values = np.linalg.svd(points.astype(np.float64), compute_uv=False)
    total = float(values.sum())
    if total == 0:
        return math.nan
    shares = values[values > 0] / total
    return float(math.exp(-(shares * np.log(shares)).sum()))


@dataclass(frozen=True)
class Whitening:
    """A whitening: a linear map under which the vectors that it was fitted on have mean 0 and covariance 1 (Su et al.
    2021, 2103.15316).

    Attributes:
        mean: [n] mean of these vectors.
        matrix: [n, k], for the k directions with variance.
    """

    mean: Floats
    matrix: Floats

    @classmethod
    def fit(cls, points: NDArray[np.floating]) -> "Whitening":
        """Fit a whitening to one or more vectors, [N, n]."""
        cloud = points.astype(np.float64)
        variances, directions = _principal_axes(cloud)
        some = variances > _MIN_VARIANCE_SHARE * variances.max(initial=0.0)
        return cls(cloud.mean(0), directions[:, some] / np.sqrt(variances[some]))

    def __call__(self, points: NDArray[np.floating]) -> Floats:
        """Return the whitened vectors, [N, k]."""
        white: Floats = (points.astype(np.float64) - self.mean) @ self.matrix
        return white


def _principal_axes(cloud: Floats) -> tuple[Floats, Floats]:
    """Return the variances along the principal directions, [n], and the directions as columns, [n, n]."""
    centred = cloud - cloud.mean(0)
    variances, directions = np.linalg.eigh(centred.T @ centred / max(len(cloud) - 1, 1))
    return np.maximum(variances, 0.0), directions


_MIN_TEXTS = 4  # texts: two to fit the whitening on, two to compare
_MIN_TOKENS = 4  # least number of tokens of a sentence
_SENTENCE_OVERSAMPLING = 4  # sentences read for each one that is requested, to choose from


def measure_anisotropy(
    frozen: FrozenEncoder, rows: Sequence[Row], poolings: Sequence[Pooling]
) -> list[Figure]:
    """Return `cosine`, `iso_score` and `effective_rank` of each layer, pooling and form, on every second row.

    Raises RunError for fewer than four rows.
    """
    if len(rows) < _MIN_TEXTS:
        raise RunError(
            f"{len(rows)} texts are too few to compare",
            remedy=f"give {_MIN_TEXTS} at least; thousands are better",
        )
    pooled = pooled_states(frozen, rows, poolings)
    return [
        figure
        for pooling in poolings
        for layer, points in enumerate(pooled[pooling])
        for form, cloud in _raw_and_whitened(points).items()
        for figure in _figures_of_cloud(cloud, layer, pooling, form)
    ]


def heldout_sentences(run: Run, frozen: FrozenEncoder, count: int) -> list[Row]:
    """Return up to `count` sentences of the run's held-out text, as rows, from all over it; the same ones every time.

    Raises CorpusError, StoreError if the text cannot be read.
    """
    draw = np.random.default_rng(0)
    corpora = Corpora(heldout_spec(run, frozen.tokenizer))
    places = [(source, block) for source, table in enumerate(corpora.tables) for block in range(len(table))]
    found: list[NDArray[np.generic]] = []
    for place in draw.permutation(len(places)):
        block = corpora.read(*places[place])
        sentences = np.split(block.tokens, block.sentences[1:-1])
        found += [tokens for tokens in sentences if len(tokens) >= _MIN_TOKENS]
        if len(found) >= _SENTENCE_OVERSAMPLING * count:
            break
    return token_rows(frozen, [found[index] for index in draw.permutation(len(found))[:count]])


def _raw_and_whitened(points: NDArray[np.float32]) -> dict[Form, NDArray[np.floating]]:
    """Return the measured half of [N, H] vectors, raw and whitened. The whitening is fitted on the other half."""
    fitted, measured = points[::2], points[1::2]
    return {"raw": measured, "whitened": Whitening.fit(fitted)(measured)}


def _figures_of_cloud(cloud: NDArray[np.floating], layer: int, pooling: Pooling, form: Form) -> list[Figure]:
    values = {
        "cosine": mean_cosine(cloud),
        "iso_score": iso_score(cloud),
        "effective_rank": effective_rank(cloud),
    }
    return [
        Figure(measure=name, value=value, layer=layer, pooling=pooling, form=form)
        for name, value in values.items()
    ]
