"""A small XLNet trained by the real loop on lanes of synthetic text, and the same in plain PyTorch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from encoder_core.batch import Batch
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.modules.permuted import PermutedLanguageModel
from encoder_core.objectives.plm import PlmConfig
from encoder_core.optim.adamw import AdamW
from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.settings import AdamWConfig
from encoder_core.optim.updates import set_update
from encoder_core.train.engine import Engine
from encoder_core.train.exchange import RankGroup
from encoder_core.train.loop import StepData, Trainer, TrainPlan
from encoder_core.train.metrics import StepReport
from encoder_core.train.settings import MEMORY_KIND, MemoryRefresh
from encoder_core.train.state import TrainState
from encoder_core.train.step import Memories, Microbatch, RankBatch, seed_draws
from encoder_core.train.xlnet_memory import StoredMemory, restore_memory
from encoder_core.train.zero_state import KINDS
from tests.support.ranks.fragments import Piece, Whole, pieces, whole
from tests.support.ranks.small_training import Setting, small_engine

SEED, STEPS, RATE = 5, 8, 1e-3
ROWS, MICROBATCHES = 2, 3  # so one of two ranks idles through the second round
LENGTH, VOCAB = 14, 61
CONFIG = XlnetConfig(
    layers=2, hidden=32, heads=2, feed_forward=48, max_length=LENGTH, vocab=VOCAB, reuse=6, memory=8, memory_refresh=3
)  # fmt: skip
REFRESH = MemoryRefresh(every=3, steps=2)


@dataclass(frozen=True)
class Trace:
    """What one rank saw: losses by step, and the fragments and shapes of its last state."""

    losses: list[float]
    state: TrainState
    fragments: list[Piece]
    shapes: dict[str, tuple[int, ...]]
    told: list[tuple[int, str, int]]


@dataclass(frozen=True)
class Checkpoint:
    """All ranks' last state, put together."""

    state: TrainState
    shapes: dict[str, tuple[int, ...]]
    kept: Whole

    @property
    def memory(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for name, shape in self.shapes.items() if name.startswith(MEMORY_KIND)}

    def read(self, name: str, kind: str, start: int, stop: int) -> torch.Tensor:
        return torch.from_numpy(self.kept[name][kind][start:stop])


def assemble(traces: list[Trace]) -> Checkpoint:
    """Fails where an element is missing or held twice."""
    first = traces[0]
    return Checkpoint(first.state, first.shapes, whole((trace.fragments for trace in traces), first.shapes))


@dataclass(frozen=True)
class Job:
    """Train under a setting, from a checkpoint if given, until asked to stop at step `stop`, or to the end."""

    setting: Setting
    stop: int = STEPS
    resumed: Checkpoint | None = None


def train(rank: int, world: int, jobs: list[Job]) -> list[Trace]:
    """One after the other."""
    control = RankGroup.join()
    return [_train(control, job.setting, job.stop, job.resumed) for job in jobs]


def _train(control: RankGroup, setting: Setting, stop: int, resumed: Checkpoint | None) -> Trace:
    model = fresh_model()
    optimizer = AdamW(parameter_groups(model, 0.01), AdamWConfig(lr=RATE, clip=None))
    engine = small_engine(model, optimizer, setting.stage, setting.precision)
    state, memories = TrainState(), Memory()
    if resumed is not None:
        state = resumed.state
        engine.restore(KINDS, resumed.read)
        if resumed.memory:
            mine = range(control.rank, MICROBATCHES, control.world)
            restore_memory(memories, resumed.memory, resumed.read, mine, ROWS, engine)
    keeper, journal = Keeper(), Journal()
    plan = TrainPlan(SEED, STEPS, lambda step: RATE, evaluate_every=2)
    trainer = Trainer(
        engine,
        control,
        Lanes(control, model),
        keeper,
        AnyLoss(),
        journal,
        plan,
        lambda: state.step + len(journal.losses) == stop,
        memories,
    )
    return keeper.trace(journal, trainer.train(state))


Memory = dict[int, tuple[torch.Tensor, ...]]


def fresh_model() -> PermutedLanguageModel:
    torch.manual_seed(SEED)
    model = PlmConfig().build(CONFIG)
    initialise(model)
    return model


class AnyLoss:
    """Makes every update."""

    def gradient_norm_limit(self, step: int, turn: str, sums: Mapping[str, float]) -> float:
        return math.inf

    def receive_report(self, report: StepReport) -> None: ...


class Lanes:
    """Each lane's own text, of which a row takes `LENGTH` tokens and moves on by what is reused."""

    def __init__(self, control: RankGroup, model: PermutedLanguageModel) -> None:
        self._control, self._model = control, model

    def fetch(self, step: int) -> StepData:
        work = self._work(step)
        before = REFRESH.recomputed_steps(step, 0)
        return StepData(
            work=work,
            counts={"plm": sum(m.batch.target_ids.numel() for m in work.microbatches)},
            tokens=sum(m.batch.tokens.numel() for m in work.microbatches),
            digest=0,
            samples=(),
            wait=0.0,
            before=None if before is None else tuple(self._work(number) for number in before),
        )

    def heldout_microbatches(self, step: int) -> dict[str, list[Microbatch]]:
        return {"": [microbatch(1000, self._control.rank)]}

    def _work(self, step: int) -> RankBatch:
        mine = range(self._control.rank, MICROBATCHES, self._control.world)
        return RankBatch(step, tuple(microbatch(step, index) for index in mine), MICROBATCHES)


def microbatch(step: int, index: int) -> Microbatch:
    """Two lanes, the second read backwards; the same for a step and index everywhere."""
    first = step * CONFIG.reuse
    texts = [_text(index * ROWS + lane)[first : first + LENGTH] for lane in range(ROWS)]
    draws = torch.Generator().manual_seed(1000 * step + index)
    tokens, order = torch.cat(texts), torch.zeros(ROWS * LENGTH, dtype=torch.int64)
    targets = torch.randperm(ROWS * LENGTH, generator=draws)[:7].sort().values
    order[targets] = 1 + torch.randperm(7, generator=draws)
    return Microbatch(
        index,
        Batch(
            tokens=tokens,
            cu_seqlens=torch.arange(0, (ROWS + 1) * LENGTH, LENGTH, dtype=torch.int32),
            max_length=LENGTH,
            positions=torch.arange(LENGTH).repeat(ROWS),
            target_positions=targets,
            target_ids=tokens[targets],
            segments=(torch.arange(LENGTH).repeat(ROWS) >= 9).long(),
            order=order,
            reversed_rows=torch.tensor([False, True]),
        ),
    )


def _text(lane: int) -> torch.Tensor:
    return torch.randint(5, VOCAB, (8000,), generator=torch.Generator().manual_seed(lane))


@dataclass
class Journal:
    losses: list[float] = field(default_factory=list)
    told: list[tuple[int, str, int]] = field(default_factory=list)

    def report_activity(self, step: int, doing: str, done: int = 0) -> None:
        self.told.append((step, doing, done))

    def report_step(self, report: StepReport) -> None:
        self.losses.append(report.to_record()["loss"])

    def report_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        assert figures["plm_loss"] > 0


class Keeper:
    """Keeps the last state."""

    def is_due(self, step: int) -> bool:
        return False

    def is_ready(self) -> bool:
        return False

    def begin(self, engine: Engine, state: TrainState) -> None:
        raise AssertionError

    def commit(self) -> None:
        raise AssertionError

    def finish(self, engine: Engine, state: TrainState, carried: StoredMemory) -> None:
        self._fragments = pieces((*engine.fragments(), *carried.fragments))
        self._shapes = {**engine.shapes, **carried.shapes}

    def trace(self, journal: Journal, state: TrainState) -> Trace:
        return Trace(journal.losses, state, self._fragments, self._shapes, journal.told)


def alone(steps: int) -> tuple[list[float], PermutedLanguageModel, Memories]:
    """The same in one process, step for step as it is meant, without any of the above."""
    model, losses = fresh_model(), []
    optimizer = AdamW(parameter_groups(model, 0.01), AdamWConfig(lr=RATE, clip=None))
    memory: Memory = {}
    for step in range(steps):
        if step % 3 == 0:
            memory = _recomputed(model, step)
        model.train()
        batches = [microbatch(step, index).batch for index in range(MICROBATCHES)]
        targets = sum(len(batch.target_ids) for batch in batches)
        optimizer.zero_grad()
        total = 0.0
        for index, batch in enumerate(batches):
            seed_draws(SEED, step, index)
            sums = model(batch, memory.get(index, ()))
            memory[index] = sums.memory
            (sums.terms[0].loss_sum / targets).backward()
            total += sums.terms[0].loss_sum.item()
        losses.append(total / targets)
        set_update(optimizer, lr=RATE, count=step + 1)
        optimizer.step()
    return losses, model, memory


@torch.no_grad()
def _recomputed(model: PermutedLanguageModel, step: int) -> Memory:
    """From the two steps before, with the present weights and without dropout, predictions included."""
    model.eval()
    memory: Memory = {}
    for index in range(MICROBATCHES):
        for before in range(max(step - 2, 0), step):
            memory[index] = model(microbatch(before, index).batch, memory.get(index, ())).memory
    return memory
