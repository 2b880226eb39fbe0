"""Held-out loss of a run's checkpoint, by the length of rows and by corpus.

By length: the same held-out text cut into rows of at most 32, 64, 128, ... tokens up to the run's own length, which
shows what the model gains from context. By source: each corpus of the recipe alone, at the run's own length. Masks are
those of the run's own evaluation, dropout is off. Computed in fp32, so in a run in bf16 the figures differ a little
from those that its ranks record.
"""

from collections.abc import Mapping

import torch

from data_service.samples.lanes import Lanes
from data_service.samples.spec import StreamSpec
from data_service.stream.stream import Stream
from encoder_core.objectives.losses import CoupledObjective
from encoder_core.train.collate import to_batch
from encoder_core.train.metrics import means, sum_losses
from encoder_core.train.step import Microbatch
from launcher.after.diagnose.frozen import Checkpoint
from launcher.runtime.rank.teachers import teach
from launcher.runtime.run.evaluations import Figure
from launcher.runtime.run.streams import heldout_spec

_SHORTEST = 32  # tokens of a row
_MOST_ROWS = 64  # at a time


def held_out(checkpoint: Checkpoint, rows: int) -> list[Figure]:
    """Each term's `<term>_loss` (nats per target) and metrics, and the weighted `loss`, for each length and source.

    `rows`: of the run's own length at most; of shorter ones as many as hold as many tokens, but where the loss couples
    the rows of a batch: there a batch of another size would be another task.

    Raises CorpusError, PlanError, StoreError: the held-out text cannot be read; for teachers, as
    `launcher.runtime.run.teachers.read_teachers`.
    """
    spec = heldout_spec(checkpoint.run, checkpoint.frozen.tokenizer)
    teach(checkpoint.objective, checkpoint.run, checkpoint.frozen.tokenizer)
    coupled = isinstance(checkpoint.objective, CoupledObjective)
    found = []
    for length in _lengths(spec):
        cut = StreamSpec.model_validate(spec.model_dump() | {"length": length})
        count = rows if coupled else rows * spec.length // length
        figures = _evaluate(checkpoint, cut, count)
        found += [Figure(measure=name, value=value, length=length) for name, value in figures.items()]
    for source in spec.sources:
        alone = source.model_copy(update={"weight": None})
        own = spec.model_copy(update={"sources": (alone,)})
        figures = _evaluate(checkpoint, own, rows)
        found += [Figure(measure=name, value=value, source=source.name) for name, value in figures.items()]
    return found


def _lengths(spec: StreamSpec) -> list[int]:
    """Lanes (XLNet) fix where a row's parts begin, so such rows have one length only."""
    if isinstance(spec.input, Lanes):
        return [spec.length]
    shorter = [1 << power for power in range(5, 17) if _SHORTEST <= 1 << power < spec.length]
    return [*shorter, spec.length]


def _evaluate(checkpoint: Checkpoint, spec: StreamSpec, rows: int) -> Mapping[str, float]:
    run = checkpoint.run
    stream = Stream(spec, cache=run.store.at("cache"))
    last, size = min(rows, stream.samples_per_epoch), min(run.recipe.phase_microbatches[-1], _MOST_ROWS)
    microbatches = (
        Microbatch(
            index, to_batch(stream.read(0, first, min(first + size, last)), torch.device("cpu"), first)
        )
        for index, first in enumerate(range(0, last, size))
    )
    return means(sum_losses(checkpoint.objective, checkpoint.objective, microbatches, run.recipe.seed))
