"""The training loop. Data and storage come in through protocols, so that the loop does not depend on where they are.

Each step ends with one gather: sums of losses, the speed of every rank, and digests of the weights.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from encoder_core.layers.attention import set_rotary_base
from encoder_core.train.engine import Engine, Update
from encoder_core.train.exchange import RankGroup, StepSignals, exchange_signals
from encoder_core.train.metrics import CopyReport, StepReport, evaluate_all
from encoder_core.train.rehearsal import is_out_of_memory
from encoder_core.train.settings import Pace
from encoder_core.train.state import TrainState
from encoder_core.train.step import Memories, Microbatch, RankBatch, accumulate_gradients
from encoder_core.train.weight_check import Digest, ensure_same_digests, ensure_same_weights, join_int64, split_int64
from encoder_core.train.xlnet_memory import StoredMemory, recompute_memory, stored_memory

_PACE_COLUMNS = 3  # columns of a rank's row that hold its `Pace`; digests follow

HANDING_OVER = "handing over"
"""The activity of ranks that have left the last state in memory for other ranks, who go on at once."""
LAYER_SETTERS: Mapping[str, Callable[[nn.Module, float], None]] = {
    "rope_base": partial(set_rotary_base, local=False),
    "local_rope_base": partial(set_rotary_base, local=True),
}
"""Functions that change the layers of a model while it trains, by the key of a recipe's phase."""


@dataclass(frozen=True)
class StepResults:
    """The results of a step that all ranks know.

    Attributes:
        sums: sums over all ranks, with the same bits on each.
        paces: speed of each rank, in rank order.
        digests: digest of each rank's weights, in rank order; all empty if this step does not compare them.
    """

    sums: dict[str, float]
    paces: tuple[Pace, ...]
    digests: tuple[Digest, ...]


def gather_step_results(
    control: RankGroup, sums: Mapping[str, float], pace: Pace, digests: Sequence[Tensor]
) -> StepResults:
    """Send this rank's figures and return those of all ranks. Collective: every rank passes the same names and
    equally many digests.
    """
    names = sorted(sums)
    row = [*(sums[name] for name in names), pace.data, pace.forward, pace.tokens, *split_int64(digests)]
    table = control.gather_rows(row)
    totals, rest = table[:, : len(names)].sum(dim=0).tolist(), table[:, len(names) :].tolist()
    return StepResults(
        sums=dict(zip(names, totals, strict=True)),
        paces=tuple(
            Pace(data, forward, int(tokens)) for data, forward, tokens in (row[:_PACE_COLUMNS] for row in rest)
        ),
        digests=tuple(join_int64(row[_PACE_COLUMNS:]) for row in rest),
    )


@dataclass(frozen=True)
class StepData:
    """The data of a rank for one step.

    Attributes:
        work: the microbatches.
        counts: number of this rank's targets, by loss term.
        tokens: number of this rank's tokens, including special tokens.
        digest: sum over the rows of a 32-bit checksum of the model's input.
        samples: (epoch, start, stop) ranges of the whole step, the same on every rank.
        wait: seconds that this rank waited for the data service.
        before: this rank's part of the earlier steps from which memory is recomputed before this step; None: the
            memory is kept.
    """

    work: RankBatch
    counts: Mapping[str, int]
    tokens: int
    digest: int
    samples: tuple[tuple[int, int, int], ...]
    wait: float
    before: tuple[RankBatch, ...] | None = None


class StepDataSource(Protocol):
    """The source of the steps' data."""

    def fetch(self, step: int) -> StepData: ...

    def heldout_microbatches(self, step: int) -> Mapping[str, Iterable[Microbatch]]:
        """Return this rank's held-out microbatches after `step` steps, by the prefix of their figures (the run's own
        text has none): equally many on every rank, with the same rows and masks at every call. The objective of the
        last step has targets in them.
        """
        ...


class Checkpointer(Protocol):
    """Saves states. `begin` returns at once; all ranks call `commit` at the same step.

    `is_due` is true only at steps before which memory is recomputed, so these checkpoints contain no memory. The last
    state of a run may be at any step, so `finish` receives the memory, too.
    """

    def is_due(self, step: int) -> bool: ...
    def is_ready(self) -> bool: ...
    def begin(self, engine: Engine, state: TrainState) -> None: ...
    def commit(self) -> None: ...
    def finish(self, engine: Engine, state: TrainState, carried: StoredMemory) -> None: ...


class StateCopies(Protocol):
    """Copies states to memory, so that a restart need not go back to a checkpoint. A copy may be of any step."""

    def is_due(self, step: int) -> bool:
        """Return whether this rank is for a copy of the state after `step` steps. Not collective. If any rank is asked
        to stop in this step, such a copy must be enough for those who go on.
        """
        ...

    def copy_state(self, engine: Engine, state: TrainState, carried: StoredMemory, since: float) -> int | None:
        """Copy the state; return the bytes of this rank's part, None if there is no memory for it. All ranks call it at
        the same step, after their weights have been compared. `since`: time at which training began to wait for it, by
        `time.monotonic`.
        """
        ...


class LossGuard(Protocol):
    """Decides what to do about losses that are not finite or far too high. Every rank decides the same."""

    def gradient_norm_limit(self, step: int, update_group: str, sums: Mapping[str, float]) -> float:
        """Return the largest gradient norm that updates an update group, given this rank's sums. Collective."""
        ...

    def receive_report(self, report: StepReport) -> None:
        """Receive the report of a step. An error is raised on all ranks, and ends training without a commit."""
        ...


class MicrobatchSizer(Protocol):
    """Decides how many rows a microbatch has, if memory limits it. All ranks reach the same number."""

    def fits(self, work: RankBatch, memories: Memories) -> bool:
        """Return whether this rank's part of a step will fit into its memory. Not collective."""
        ...

    def shrink(self, step: int) -> None:
        """Make microbatches smaller from `step` on, since some rank's part does not fit. Called on all ranks."""
        ...

    def out_of_memory_error(self, step: int, error: RuntimeError) -> Exception:
        """Return the error to raise if memory ran out in the middle of `step` on this rank."""
        ...


class TrainJournal(Protocol):
    """Records progress. Rank 0's calls are written down; the other ranks' calls are heartbeats."""

    def report_activity(self, step: int, doing: str, done: int = 0) -> None:
        """Report that the rank now does `doing`, after `step` steps. `done` counts progress in it.
        "training" reports its end.
        """
        ...

    def report_step(self, report: StepReport) -> None: ...
    def report_evaluation(self, step: int, figures: Mapping[str, float]) -> None: ...


@dataclass(frozen=True)
class TrainPlan:
    """What to do at which step: pure functions of the step, fixed by the recipe.

    Attributes:
        weights: weights, in a step, of the loss terms whose weight changes during the run. Held-out losses use the
            terms' own weights.
        layers: settings of layers in a step, by names of `LAYER_SETTERS`, if they change during the run. An evaluation
            after a step uses that step's settings.
    """

    seed: int
    steps: int
    learning_rate: Callable[[int], float]
    evaluate_every: int | None
    compare_every: int | None = None
    weights: Callable[[int], Mapping[str, float]] = lambda step: {}
    layers: Callable[[int], Mapping[str, float]] = lambda step: {}

    def evaluates_after(self, step: int) -> bool:
        return self.evaluate_every is not None and (step % self.evaluate_every == 0 or step == self.steps)

    def compares_weights_in(self, step: int) -> bool:
        """Return whether all ranks compare their weights before the update of `step`."""
        return self.compare_every is not None and step % self.compare_every == 0


@dataclass(frozen=True)
class Trainer:
    """The parts of a training process, and the loop that runs them."""

    engine: Engine
    control: RankGroup
    data: StepDataSource
    checkpointer: Checkpointer
    losses: LossGuard
    journal: TrainJournal
    plan: TrainPlan
    stop_requested: Callable[[], bool]
    memories: Memories = field(default_factory=dict)
    microbatches: MicrobatchSizer | None = None
    copies: StateCopies | None = None

    def train(self, state: TrainState) -> TrainState:
        """Train from `state` to the last step, or until any rank is asked to stop. Return the final state, which is
        committed. If other ranks go on at once, the last state may be in memory instead.

        A step whose microbatches do not fit into memory restarts with smaller ones, before any of its work has counted.

        Raises:
            CorruptReplica: weights differ between ranks. Nothing of the step is committed.
            Exception: memory ran out in the middle of a step; the error is that of `microbatches`.
        """
        carried = StoredMemory()
        if state.step == 0 and self.plan.evaluates_after(0):  # what the run starts from, such as a published model
            self._apply_layer_settings(0)
            self._evaluate(0)
        while state.step < self.plan.steps:
            # Read the data, and agree with the other ranks on what precedes the step.
            started = time.monotonic()
            fetched = self.data.fetch(state.step)
            fetching = time.monotonic() - started
            signals = self._exchange(state, fetched)
            if signals.stop and signals.keep and self._hand_over(state, fetched):
                return state
            if signals.stop:
                carried = self._carried_memory(fetched)
                break
            if not signals.fits and self.microbatches is not None:
                self.microbatches.shrink(state.step)
                continue
            copied = self._copy_if_due(state, fetched, due=signals.keep)
            learning_rate = self.plan.learning_rate(state.step)
            sums, updates, digests = self._run_groups(state, fetched, signals)
            # One gather of sums, speeds and digests; the weights must agree before anything is recorded.
            pace = Pace(fetching, self.engine.forwards.take_seconds(), fetched.tokens)
            results = gather_step_results(self.control, sums, pace, digests)
            ensure_same_digests(results.digests, self.engine.replicated, self.control, state.step)
            report = StepReport(
                before=state,
                samples=fetched.samples,
                signals=signals,
                sums=results.sums,
                learning_rate=learning_rate,
                updates=updates,
                seconds=time.monotonic() - started,
                paces=results.paces,
                copied=copied,
            )
            self.journal.report_step(report)
            self.losses.receive_report(report)
            state = state.after_step(applied=report.applied_by_group, tokens=signals.tokens)
            # Commit what has been uploaded, evaluate, begin the next save.
            if signals.saved:
                self._commit(state.step)
            if self.plan.evaluates_after(state.step):
                self._evaluate(state.step)
            if signals.save:
                ensure_same_weights(self.engine.replicated, self.control, state.step)
                self.checkpointer.begin(self.engine, state)
        self._save_final(state, carried)
        return state

    def _hand_over(self, state: TrainState, next_data: StepData) -> bool:
        """Leave the last state in memory for other ranks. Return whether all ranks had the memory. Collective."""
        made = self._copy_state(state, next_data, time.monotonic()) is not None
        everywhere = bool(self.control.gather_rows([made]).all())
        if everywhere:
            self.journal.report_activity(state.step, HANDING_OVER)
        return everywhere

    def _save_final(self, state: TrainState, carried: StoredMemory) -> None:
        self.journal.report_activity(state.step, "saving")
        ensure_same_weights(self.engine.replicated, self.control, state.step)
        self.checkpointer.finish(self.engine, state, carried)

    def _run_groups(
        self, state: TrainState, fetched: StepData, signals: StepSignals
    ) -> tuple[dict[str, float], dict[str, Update], list[Tensor]]:
        """Recompute memory at fixed steps, then compute gradients and updates of each group; see `_update`."""
        try:
            if fetched.before is not None:
                recompute_memory(self.engine, fetched.before, self.memories)
            return self._update(state, fetched, signals)
        except RuntimeError as error:
            if self.microbatches is None or not is_out_of_memory(error):
                raise
            raise self.microbatches.out_of_memory_error(state.step, error) from error

    def _update(
        self, state: TrainState, fetched: StepData, signals: StepSignals
    ) -> tuple[dict[str, float], dict[str, Update], list[Tensor]]:
        """Return, for each group, this rank's sums, the update, and the digest of the weights before it."""
        self.engine.forwards.take_seconds()
        self._apply_layer_settings(state.step)
        sums: dict[str, float] = {}
        updates: dict[str, Update] = {}
        digests: list[Tensor] = []
        for group in self.engine.update_groups:
            own = accumulate_gradients(
                self.engine,
                fetched.work,
                counts=signals.counts,
                seed=self.plan.seed,
                memories=self.memories,
                update_group=group,
                weights=self.plan.weights(state.step),
            )
            digests += self._digests(state.step)
            limit = self.losses.gradient_norm_limit(state.step, group, own)
            learning_rate = self.plan.learning_rate(state.step)
            updates[group] = self.engine.update(learning_rate, state.next_update_number(group), group, limit)
            sums |= own
        return sums, updates, digests

    def _apply_layer_settings(self, step: int) -> None:
        """Apply the settings of layers in `step`."""
        for name, value in self.plan.layers(step).items():
            LAYER_SETTERS[name](self.engine.objective, value)

    def _copy_if_due(self, state: TrainState, next_data: StepData, *, due: bool) -> CopyReport | None:
        """Copy `state` to memory if it is due. Return what was copied; None if the run makes no copies."""
        if self.copies is None or not due:
            return CopyReport() if self.copies is not None else None
        since = time.monotonic()
        size = self._copy_state(state, next_data, since)
        return CopyReport(time.monotonic() - since, size or 0)

    def _copy_state(self, state: TrainState, next_data: StepData, since: float) -> int | None:
        """Copy `state` to memory, as `StateCopies.copy_state`, with the memory that the next step needs. Weights
        that differ must not be copied."""
        assert self.copies is not None
        ensure_same_weights(self.engine.replicated, self.control, state.step)
        return self.copies.copy_state(self.engine, state, self._carried_memory(next_data), since)

    def _commit(self, step: int) -> None:
        self.journal.report_activity(step, "saving")
        self.checkpointer.commit()
        self.journal.report_activity(step, "training")

    def _evaluate(self, step: int) -> None:
        def progress(done: int) -> None:
            self.journal.report_activity(step, "evaluating", done)

        progress(0)
        figures = evaluate_all(
            self.engine, self.control, lambda: self.data.heldout_microbatches(step), self.plan.seed, progress
        )
        self.journal.report_evaluation(step, figures)
        self.journal.report_activity(step, "training")

    def _digests(self, step: int) -> list[Tensor]:
        """Return the digest of the weights that gradients were computed with, if this step compares them."""
        if self.control.world == 1 or not self.plan.compares_weights_in(step):
            return []
        return [self.engine.replicated.digest()]

    def _carried_memory(self, next_data: StepData) -> StoredMemory:
        """Return the memory that the next step would have used; it goes into the checkpoint."""
        return stored_memory(self.memories, next_data.work.total) if next_data.before is None else StoredMemory()

    def _exchange(self, state: TrainState, fetched: StepData) -> StepSignals:
        own = StepSignals(
            stop=self.stop_requested(),
            save=self.checkpointer.is_due(state.step + 1),
            saved=self.checkpointer.is_ready(),
            fits=self.microbatches is None or self.microbatches.fits(fetched.work, self.memories),
            keep=self.copies is not None and self.copies.is_due(state.step),
            wait=fetched.wait,
            tokens=fetched.tokens,
            digest=fetched.digest,
            counts=fetched.counts,
        )
        return exchange_signals(self.control, own)
