"""Anisotropy of a checkpoint: layer by layer and pooling by pooling, raw and whitened.

Encoders put all vectors into a narrow cone: texts that have nothing to do with each other have cosines near 1
(Ethayarajh 2019). Whitening is fitted on every second text and measured on the others, like everything else here:
on the texts that it was fitted on it would be perfect by construction.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from data_service.stream.sources import Corpora
from launcher.after.diagnose.frozen import Frozen
from launcher.after.diagnose.isotropy import Whitening, effective_rank, iso_score, mean_cosine
from launcher.after.diagnose.states import Row, pooled_states, rows_of_tokens
from launcher.errors import RunError
from launcher.runtime.recipe.evaluation import Pooling
from launcher.runtime.run.evaluations import Figure, Form
from launcher.runtime.run.record import Run
from launcher.runtime.run.streams import heldout_spec

_LEAST = 4  # texts: two to fit the whitening on, two to compare
_SHORTEST = 4  # tokens of a sentence that is one
_PLENTY = 4  # times as many sentences as asked for, to choose from


def anisotropy(frozen: Frozen, rows: Sequence[Row], poolings: Sequence[Pooling]) -> list[Figure]:
    """`cosine`, `iso_score` and `effective_rank` of each layer, pooling and form, on every second row.

    Raises RunError: fewer than four rows.
    """
    if len(rows) < _LEAST:
        raise RunError(
            f"{len(rows)} texts are too few to compare",
            remedy=f"give {_LEAST} at least; thousands are better",
        )
    pooled = pooled_states(frozen, rows, poolings)
    return [
        figure
        for pooling in poolings
        for layer, points in enumerate(pooled[pooling])
        for form, cloud in _forms(points).items()
        for figure in _measured(cloud, layer, pooling, form)
    ]


def heldout_sentences(run: Run, frozen: Frozen, count: int) -> list[Row]:
    """Up to `count` sentences of the run's held-out text, as rows, from all over it; the same ones every time.

    Raises CorpusError, StoreError: it cannot be read.
    """
    draw = np.random.default_rng(0)
    corpora = Corpora(heldout_spec(run, frozen.tokenizer))
    places = [(source, block) for source, table in enumerate(corpora.tables) for block in range(len(table))]
    found: list[NDArray[np.generic]] = []
    for place in draw.permutation(len(places)):
        block = corpora.read(*places[place])
        sentences = np.split(block.tokens, block.sentences[1:-1])
        found += [tokens for tokens in sentences if len(tokens) >= _SHORTEST]
        if len(found) >= _PLENTY * count:
            break
    return rows_of_tokens(frozen, [found[index] for index in draw.permutation(len(found))[:count]])


def _forms(points: NDArray[np.float32]) -> dict[Form, NDArray[np.floating]]:
    """[N, H] vectors to those that are measured, in either form."""
    fitted, measured = points[::2], points[1::2]
    return {"raw": measured, "whitened": Whitening.fit(fitted)(measured)}


def _measured(cloud: NDArray[np.floating], layer: int, pooling: Pooling, form: Form) -> list[Figure]:
    values = {
        "cosine": mean_cosine(cloud),
        "iso_score": iso_score(cloud),
        "effective_rank": effective_rank(cloud),
    }
    return [
        Figure(measure=name, value=value, layer=layer, pooling=pooling, form=form)
        for name, value in values.items()
    ]
