"""One optimisation step: the global batch in logical microbatches, normalised by the step's own target counts.

The global batch is divided into microbatches of a fixed number of rows for any world size, and these are assigned to
the ranks round-robin. Random draws (dropout, sampled tokens) depend on (seed, step, row, position in the row), never on
the rank or the microbatch, and loss sums are divided by the targets of the whole step. So, up to rounding, the update
equals that of a single process with the whole batch.
"""

import hashlib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from encoder_core.batch import Batch, idle_batch
from encoder_core.objectives.modules.losses import CoupledObjective, LossSums
from encoder_core.optim.updates import ALL_PARAMETERS
from encoder_core.train.engine import Engine
from encoder_core.train.exchange import RankExamples, RankGroup


def draw_seed(seed: int, step: int, microbatch: int = 0, update_group: str = ALL_PARAMETERS) -> int:
    """Return a 63-bit seed, a hash, so that random draws of neighbouring steps, microbatches and runs are unrelated."""
    place = f"{seed}/{step}/{microbatch}" + ("" if update_group == ALL_PARAMETERS else f"/{update_group}")
    digest = hashlib.blake2b(place.encode(), digest_size=8, person=b"maskfleet-draws")
    return int.from_bytes(digest.digest(), "little") >> 1


def seed_draws(seed: int, step: int, microbatch: int, update_group: str = ALL_PARAMETERS) -> None:
    """Seed torch's default generators for one logical microbatch in one update group.

    All microbatches of a step have the same CPU seed, because our own random draws are hashed from row numbers
    (`encoder_core/random_draws.py`). GPU seeds differ, for flash attention, whose dropout ignores row numbers.
    """
    torch.manual_seed(draw_seed(seed, step, 0, update_group))
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(draw_seed(seed, step, microbatch, update_group))


@dataclass(frozen=True)
class Microbatch:
    """A logical microbatch: its index in the global batch, and its rows."""

    index: int
    batch: Batch


@dataclass(frozen=True)
class RankBatch:
    """A rank's share of a step's global batch.

    Attributes:
        step: number of the step.
        microbatches: microbatches of this rank, in order.
        total: number of logical microbatches in the global batch, over all ranks.
    """

    step: int
    microbatches: tuple[Microbatch, ...]
    total: int

    def round_count(self, world: int) -> int:
        """Return the number of rounds. In each, every rank runs a microbatch, an idle one if it has none left."""
        return -(-self.total // world)

    def microbatch(self, round_index: int, device: torch.device) -> Microbatch:
        """Return this rank's microbatch in round `round_index`. If none is left, return an idle one, without rows and
        with index `total`."""
        if round_index < len(self.microbatches):
            return self.microbatches[round_index]
        return Microbatch(self.total, idle_batch(device))


NO_WEIGHTS: Mapping[str, float] = {}  # no term has a scheduled weight

Memories = MutableMapping[int, tuple[Tensor, ...]]
"""The memory that the module returned, by index of the logical microbatch, to be passed with its next rows."""


def accumulate_gradients(
    engine: Engine,
    work: RankBatch,
    counts: Mapping[str, float],
    seed: int,
    memories: Memories,
    update_group: str = ALL_PARAMETERS,
    weights: Mapping[str, float] = NO_WEIGHTS,
) -> dict[str, float]:
    """Accumulate the gradient of one update group of a step; return this rank's sums (not means) of losses and metrics.

    `counts`: number of targets in the global batch, by loss term. `weights`: this step's weights of the terms whose
    weight is scheduled; the other terms have their own weights.
    """
    engine.begin_update_group(update_group)
    memories.update(_run_first_pass(engine, work, seed, update_group))
    sums = RunningSums()
    rounds = work.round_count(engine.world)
    for i in range(rounds):
        microbatch = work.microbatch(i, engine.device)
        seed_draws(seed, work.step, microbatch.index, update_group)
        losses: LossSums = engine(microbatch.batch, memories.pop(microbatch.index, ()))
        engine.backward(_step_loss_share(losses, counts, weights), last=i == rounds - 1)
        sums.add(losses, weights)
        if losses.memory:
            memories[microbatch.index] = losses.memory
    return sums.copy_to_host()


def _run_first_pass(engine: Engine, work: RankBatch, seed: int, update_group: str) -> dict[int, tuple[Tensor, ...]]:
    """Run a coupled objective's first pass, and return its second pass's memory by logical microbatch. Collective.
    Other objectives have no first pass, and get an empty result.
    """
    if not isinstance(engine.objective, CoupledObjective):
        return {}
    own, indices = list[Tensor](), list[int]()
    with torch.no_grad():
        for i in range(work.round_count(engine.world)):
            microbatch = work.microbatch(i, engine.device)
            seed_draws(seed, work.step, microbatch.index, update_group)
            own += engine(microbatch.batch).memory
            indices.append(microbatch.index)
    everyone, joined = RankExamples.from_all_ranks(own)
    coupled = engine.objective.couple(joined, everyone)
    sizes = [len(examples) for examples in own]
    parts = [torch.split(tensor, sizes) for tensor in coupled]
    return dict(zip(indices, zip(*parts, strict=True), strict=True))


def _step_loss_share(losses: LossSums, counts: Mapping[str, float], weights: Mapping[str, float]) -> Tensor:
    """Return the microbatch's contribution to the step's loss: weighted loss sums divided by the step's targets."""
    shares = [term.step_weight(weights) * term.loss_sum / max(1.0, counts[term.name]) for term in losses.terms]
    return sum(shares[1:], start=shares[0])


class RunningSums:
    """Running sums of losses, targets and metrics, which stay on the device until the step ends."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor | float] = {}

    def add(self, losses: LossSums, weights: Mapping[str, float] = NO_WEIGHTS) -> None:
        """Add the losses of a microbatch. `weights`: see `accumulate_gradients`."""
        for name, value in losses.metrics.items():
            self._add(name, value.detach().double())
        for term in losses.terms:
            loss_sum = term.loss_sum.detach().double()
            self._add(f"{term.name}_loss", loss_sum)
            self._add(f"{term.name}_weighted", term.step_weight(weights) * loss_sum)
            self._add(f"{term.name}_targets", float(term.targets))

    def _add(self, name: str, value: Tensor | float) -> None:
        self._sums[name] = self._sums.get(name, 0.0) + value

    def copy_to_host(self) -> dict[str, float]:
        """Copy the sums to the host, in name order."""
        return {name: float(self._sums[name]) for name in sorted(self._sums)}


def gather_sums(control: RankGroup, sums: Mapping[str, float]) -> dict[str, float]:
    """Add up each named sum over all ranks, with the same bits on each rank. Every rank passes the same names."""
    names = sorted(sums)
    table = control.gather_rows([sums[name] for name in names])
    return dict(zip(names, table.sum(dim=0).tolist(), strict=True))
