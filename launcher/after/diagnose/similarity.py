"""Whether cosines of a frozen encoder's vectors agree with people about how similar two texts are."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from launcher.after.diagnose.frozen import Frozen
from launcher.after.diagnose.isotropy import Whitening
from launcher.after.diagnose.states import pooled_states, rows_of_texts
from launcher.after.tasks.examples import Sentences
from launcher.errors import RunError
from launcher.extras import EVALUATE, optional
from launcher.runtime.recipe.evaluation import Pooling
from launcher.runtime.run.evaluations import Figure, Form


def similarity(frozen: Frozen, pairs: Sentences, poolings: Sequence[Pooling]) -> list[Figure]:
    """`spearman`: the rank correlation of cosines with the scores of `pairs`, for each layer, pooling and form.

    Whitened as Su et al. (2021): fitted on the same texts, without their scores.

    Raises:
        RunError: the task has no second texts, or fewer than two pairs. MissingPackage: no scipy.
    """
    if pairs.second is None or len(pairs) < 2:
        raise RunError(
            "similarity needs pairs of texts with a score, two at least", remedy="give such a task"
        )
    pooled = pooled_states(frozen, rows_of_texts(frozen, [*pairs.first, *pairs.second]), poolings)
    return [
        Figure(measure="spearman", value=_spearman(vectors, pairs), layer=layer, pooling=pooling, form=form)
        for pooling in poolings
        for layer, points in enumerate(pooled[pooling])
        for form, vectors in _forms(points).items()
    ]


def _forms(points: NDArray[np.float32]) -> dict[Form, NDArray[np.floating]]:
    return {"raw": points, "whitened": Whitening.fit(points)(points)}


def cosines(first: NDArray[np.floating], second: NDArray[np.floating]) -> NDArray[np.float64]:
    """[N] cosines of N pairs of vectors; 0 where one has length 0."""
    products = np.einsum("nh,nh->n", first.astype(np.float64), second.astype(np.float64))
    lengths = np.linalg.norm(first, axis=1).astype(np.float64) * np.linalg.norm(second, axis=1)
    found: NDArray[np.float64] = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0)
    return found


def _spearman(vectors: NDArray[np.floating], pairs: Sentences) -> float:
    """Not a number if all cosines, or all scores, are the same."""
    found = cosines(vectors[: len(pairs)], vectors[len(pairs) :])
    if np.ptp(found) == 0 or np.ptp(pairs.labels) == 0:
        return float("nan")
    optional("scipy", "similarity", EVALUATE)
    stats = optional("scipy.stats", "similarity", EVALUATE)
    return float(stats.spearmanr(found, pairs.labels).statistic)
