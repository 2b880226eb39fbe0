"""The training loop. Data and storage are protocols here, so that the loop does not depend on their implementation.

After each step ranks gather the sums of losses, the speed of every rank, and checksums (digests) of the weights.
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

_PACE_COLUMNS = 3  # number of columns of a rank's row that hold its `Pace`; the columns of digests follow

HANDING_OVER = "handing over"
"""The reported activity of ranks that have left a copy of the last state in memory, from which other ranks continue."""
LAYER_SETTERS: Mapping[str, Callable[[nn.Module, float], None]] = {
    "rope_base": partial(set_rotary_base, local=False),
    "local_rope_base": partial(set_rotary_base, local=True),
}
"""Functions that change a setting of a model's layers during training, by the setting's key in a recipe's phase."""


@dataclass(frozen=True)
class StepResults:
    """The results of a step, gathered from all ranks.

    Attributes:
        sums: sums over all ranks, with the same bits on each.
        paces: speed of each rank, in rank order.
        digests: checksum of each rank's weights, in rank order; all empty if this step does not compare weights.
    """

    sums: dict[str, float]
    paces: tuple[Pace, ...]
    digests: tuple[Digest, ...]


def gather_step_results(
    control: RankGroup, sums: Mapping[str, float], pace: Pace, digests: Sequence[Tensor]
) -> StepResults:
    """Gather the results of a step from all ranks. Collective: every rank passes the same names and equally many
    digests.
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
        work: the rank's microbatches.
        counts: number of this rank's targets, by loss term.
        tokens: number of this rank's tokens, including special tokens.
        digest: sum over the rows of a 32-bit checksum of the model's input.
        samples: (epoch, start, stop) ranges of the samples in the global batch, the same on every rank.
        wait: seconds that this rank waited for the data service.
        before: this rank's microbatches of the earlier steps from which XLNet's memory is recomputed before this step;
            None: the memory of the last step is used.
    """

    work: RankBatch
    counts: Mapping[str, int]
    tokens: int
    digest: int
    samples: tuple[tuple[int, int, int], ...]
    wait: float
    before: tuple[RankBatch, ...] | None = None


class StepDataSource(Protocol):
    """The source of training batches and of held-out batches."""

    def fetch(self, step: int) -> StepData: ...

    def heldout_microbatches(self, step: int) -> Mapping[str, Iterable[Microbatch]]:
        """Return this rank's held-out microbatches for an evaluation after `step` steps, by the prefix of their figures
        (empty for the run's own held-out text). Every rank gets equally many; rows and masks are the same at every
        call. Targets are those of the objective of the last step.
        """
        ...


class Checkpointer(Protocol):
    """Saves checkpoints. `begin` starts a save and returns at once. `commit`, which all ranks call at the same step,
    makes the uploaded checkpoint valid.

    `is_due` is true only at steps before which XLNet's memory is recomputed, so these checkpoints do not contain it.
    A run may end at any step, so `finish` also receives XLNet's memory.
    """

    def is_due(self, step: int) -> bool: ...
    def is_ready(self) -> bool: ...
    def begin(self, engine: Engine, state: TrainState) -> None: ...
    def commit(self) -> None: ...
    def finish(self, engine: Engine, state: TrainState, carried: StoredMemory) -> None: ...


class StateCopies(Protocol):
    """Copies training states to host memory, from which a run can restart instead of from an older checkpoint."""

    def is_due(self, step: int) -> bool:
        """Return whether this rank wants a copy of the state after `step` steps. Not collective. If a rank is asked to
        stop at this step, the remaining ranks must be able to continue from the copies.
        """
        ...

    def copy_state(self, engine: Engine, state: TrainState, carried: StoredMemory, since: float) -> int | None:
        """Copy the state, and return the size in bytes of this rank's part; None if host memory is too small. All ranks
        call it at the same step, after comparing their weights. `since`: `time.monotonic()` when training began to wait
        for the copy.
        """
        ...


class LossGuard(Protocol):
    """Decides what to do about losses that are not finite or far too high. All ranks make the same decision."""

    def gradient_norm_limit(self, step: int, update_group: str, sums: Mapping[str, float]) -> float:
        """Return the gradient norm above which the group's update is skipped. `sums`: this rank's. Collective."""
        ...

    def receive_report(self, report: StepReport) -> None:
        """Receive the report of a step. May raise an error, on all ranks, which ends training without committing."""
        ...


class MicrobatchSizer(Protocol):
    """Limits the rows of a microbatch to what fits into memory. All ranks use the same number of rows."""

    def fits(self, work: RankBatch, memories: Memories) -> bool:
        """Return whether this rank's microbatches of a step will fit into its memory. Not collective."""
        ...

    def shrink(self, step: int) -> None:
        """Make microbatches smaller from `step` on, because some rank's do not fit. Called on all ranks."""
        ...

    def out_of_memory_error(self, step: int, error: RuntimeError) -> Exception:
        """Return the error to raise if memory ran out in the middle of `step` on this rank."""
        ...


class TrainJournal(Protocol):
    """Records progress. Rank 0's calls are recorded; those of other ranks only show that the rank is alive."""

    def report_activity(self, step: int, doing: str, done: int = 0) -> None:
        """Report that the rank has begun the activity `doing`, after `step` steps. `done`: progress in the activity,
        such as evaluated microbatches. The activity "training" ends any other.
        """
        ...

    def report_step(self, report: StepReport) -> None: ...
    def report_evaluation(self, step: int, figures: Mapping[str, float]) -> None: ...


@dataclass(frozen=True)
class TrainPlan:
    """A recipe's schedules and periods, as pure functions of the step.

    Attributes:
        evaluate_every, compare_every: periods of evaluations and of weight comparisons, in steps; None: never.
        weights: function from a step to the weights of the loss terms whose weight is scheduled. Held-out losses use
            the terms' own weights.
        layers: function from a step to the settings of layers that are scheduled, by key of `LAYER_SETTERS`. An
            evaluation after a step uses that step's settings.
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
    """The training loop of a rank, and the objects that it uses."""

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
        """Train from `state` to the last step, or until any rank is asked to stop. Return the final state, which has
        been committed to a checkpoint or, if other ranks continue at once, copied to memory.

        If a step's microbatches do not fit into memory, the step restarts with smaller ones before it computes.

        Raises:
            CorruptReplica: weights differ between ranks. Nothing of the step is committed.
            Exception: memory ran out in the middle of a step; `MicrobatchSizer.out_of_memory_error` gives the error.
        """
        carried = StoredMemory()
        if state.step == 0 and self.plan.evaluates_after(0):  # evaluate the initial weights, perhaps a published model
            self._apply_layer_settings(0)
            self._evaluate(0)
        while state.step < self.plan.steps:
            # Read the data, and agree with the other ranks on flags such as stop and save.
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
            # Gather sums, speeds and digests at once; the weights must be equal before anything is recorded.
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
            # Commit the uploaded checkpoint, evaluate, begin the next save.
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
        """Copy the last state to memory for other ranks. Return whether all ranks had enough memory. Collective."""
        copied_here = self._copy_state(state, next_data, time.monotonic()) is not None
        copied_everywhere = bool(self.control.gather_rows([copied_here]).all())
        if copied_everywhere:
            self.journal.report_activity(state.step, HANDING_OVER)
        return copied_everywhere

    def _save_final(self, state: TrainState, carried: StoredMemory) -> None:
        """Compare the ranks' weights, then save and commit the last checkpoint."""
        self.journal.report_activity(state.step, "saving")
        ensure_same_weights(self.engine.replicated, self.control, state.step)
        self.checkpointer.finish(self.engine, state, carried)

    def _run_groups(
        self, state: TrainState, fetched: StepData, signals: StepSignals
    ) -> tuple[dict[str, float], dict[str, Update], list[Tensor]]:
        """Recompute XLNet's memory if it is due, then compute each group's gradients and update; see `_update`."""
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
        """Compute gradients and update of each group. Return this rank's loss sums, the updates by group, and digests
        of the weights before each update."""
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
        """Set the scheduled settings of layers to their values in `step`."""
        for name, value in self.plan.layers(step).items():
            LAYER_SETTERS[name](self.engine.objective, value)

    def _copy_if_due(self, state: TrainState, next_data: StepData, *, due: bool) -> CopyReport | None:
        """Copy `state` to memory if due. Return time and size of the copy; None if the run makes no copies."""
        if self.copies is None or not due:
            return CopyReport() if self.copies is not None else None
        since = time.monotonic()
        size = self._copy_state(state, next_data, since)
        return CopyReport(time.monotonic() - since, size or 0)

    def _copy_state(self, state: TrainState, next_data: StepData, since: float) -> int | None:
        """Compare the ranks' weights, then copy `state`, with XLNet's memory for the next step; see
        `StateCopies.copy_state`."""
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
        """Return the digest of the current weights; empty if this step does not compare weights between ranks."""
        if self.control.world == 1 or not self.plan.compares_weights_in(step):
            return []
        return [self.engine.replicated.digest()]

    def _carried_memory(self, next_data: StepData) -> StoredMemory:
        """Return XLNet's memory for a checkpoint; empty if the next step recomputes it."""
        return stored_memory(self.memories, next_data.work.total) if next_data.before is None else StoredMemory()

    def _exchange(self, state: TrainState, fetched: StepData) -> StepSignals:
        """Exchange the signals of the step with all ranks; see `exchange_signals`. Collective."""
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
