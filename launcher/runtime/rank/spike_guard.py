"""Handles loss spikes on one rank: applies the policy (`launcher.runtime.policies.spikes`) and records rewinds."""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field

from pydantic import JsonValue, TypeAdapter

from checkpoints.attempt import Attempt
from checkpoints.gather import Peers, broadcast_or_raise
from checkpoints.layout import CheckpointManifest, LineageSegment
from checkpoints.listing import SKIPS_KEY, Rewind, is_on_lineage, list_committed, record_rewind
from data_service.stream.positions import StepSampleRanges
from encoder_core.train.exchange import RankGroup
from encoder_core.train.metrics import StepReport, figures_from_sums
from encoder_core.train.step import gather_sums
from launcher.errors import RunError
from launcher.runtime.policies import spikes
from launcher.runtime.policies.failures import StopDecision
from launcher.runtime.policies.spikes import LOSS, SpikeHistory, Spikes
from launcher.runtime.rank.journal import RankJournal
from launcher.runtime.run.record import Run
from launcher.runtime.run.streams import SPIKES_KEY, SkippedData

_DECISION_ADAPTER: TypeAdapter[StopDecision | str] = TypeAdapter(StopDecision | str)  # str: a line about the rewind


class Rewound(Exception):
    """The exception that ends a group of ranks because the run goes back to an earlier checkpoint. It is raised on all
    ranks after the rewind is recorded, and the next group resumes from that checkpoint."""


@dataclass
class SpikeGuard:
    """The training loop's detector of loss spikes (`encoder_core.train.loop.Losses`).

    Attributes:
        resumed: the checkpoint from which this attempt resumed; None for a start from step 0.
        lost: the data that earlier rewinds skip.
        recent: losses and gradient norms of recent steps, with which the next step is compared.
    """

    run: Run
    attempt: Attempt
    control: RankGroup
    peers: Peers
    journal: RankJournal
    positions: StepSampleRanges
    resumed: CheckpointManifest | None
    lost: SkippedData
    recent: SpikeHistory = field(init=False)
    _group_losses: dict[str, float] = field(default_factory=dict)  # loss of each update group in the current step

    def __post_init__(self) -> None:
        known = self.resumed.state.get(SPIKES_KEY) if self.resumed else None
        self.recent = SpikeHistory.from_json(known) if isinstance(known, dict) else SpikeHistory()

    def gradient_norm_limit(self, step: int, update_group: str, sums: Mapping[str, float]) -> float:
        """Return the largest gradient norm with which `update_group` is updated; minus infinity if its loss is already
        too large. `sums`: this rank's sums of the group. Collective if the recipe sets `spikes.outlier`."""
        if self._settings.outlier is None:
            return math.inf
        name = f"{update_group}_{LOSS}"
        self._group_losses[name] = figures_from_sums(gather_sums(self.control, sums))[LOSS]
        phase = self.positions.phase_at_step(step)
        if self._group_losses[name] > spikes.max_allowed_figure(self._settings, self.recent, phase, name):
            return -math.inf
        return spikes.max_allowed_figure(self._settings, self.recent, phase, _gradient_norm_name(update_group))

    def receive_report(self, report: StepReport) -> None:
        """Add a step's loss and gradient norms to the recent ones, and go back if the step completes a spike.

        Raises on all ranks:
            Rewound: if the run goes back, after the rewind is recorded.
            RunError: if the run ends, because no checkpoint is old enough or earlier rewinds did not help.
            CheckpointError, StoreError: if the rewind cannot be recorded.
        """
        step, figures = report.before.step, {LOSS: figures_from_sums(report.sums)[LOSS]}
        if self._settings.outlier is not None:
            figures |= self._group_losses | {
                _gradient_norm_name(update_group): made.grad_norm for update_group, made in report.updates.items()
            }
        phase, updated = self.positions.phase_at_step(step), all(report.applied_by_group.values())
        self.recent = spikes.next_history(self._settings, self.recent, phase, step, figures, updated=updated)
        if self.recent.since is not None and spikes.should_go_back(self._settings, self.recent, step + 1):
            norm = math.hypot(*(update.grad_norm for update in report.updates.values()))
            self._go_back(self.recent.since, step + 1, spikes.describe_bad_step(self.recent, figures[LOSS], norm))

    def state(self) -> dict[str, JsonValue]:
        """Return the guard's state for a checkpoint."""
        return {SPIKES_KEY: self.recent.to_json(), SKIPS_KEY: [list(span) for span in self.lost.spans]}

    def latest_rewind_step(self, step: int) -> int:
        """Return the latest step whose checkpoint a rewind after `step` steps may go back to."""
        return self._settings.latest_rewind_step(step if self.recent.since is None else self.recent.since)

    @property
    def _settings(self) -> Spikes:
        return self.run.recipe.spikes

    def _go_back(self, began: int, reached: int, cause: str) -> None:
        """Go back, or end the run, as rank 0 decides. Collective. `began`: the spike's first step. `reached`: steps
        done."""
        answer = broadcast_or_raise(self.peers, lambda: self._decide_rewind(began, reached, cause), _DECISION_ADAPTER)
        if isinstance(answer, StopDecision):
            raise RunError(answer.reason, remedy=answer.remedy)
        raise Rewound(answer)

    def _decide_rewind(self, began: int, reached: int, cause: str) -> StopDecision | str:
        """Decide on rank 0, and record a rewind. Return the decision to end the run, or a line about the rewind."""
        begun_at, past = (self.resumed.step, self.resumed.lineage) if self.resumed else (0, ())
        lineage = (*past, LineageSegment(attempt=self.attempt.number, start=begun_at, stop=reached))
        history = [mark for mark in list_committed(self.run.store) if is_on_lineage(lineage, mark)]
        verdict = spikes.decide_after_spike(self._settings, began, cause, history, self.lost.gone_back)
        if verdict.to is not None:
            rewind = Rewind(
                attempt=self.attempt.number,
                to=verdict.to,
                began=began,
                reached=reached,
                cause=cause,
                skips=(
                    *self.lost.spans,
                    *map(astuple, self.positions.ranges_of_steps(verdict.to.step, reached)),
                ),
            )
            self._record_rewind(rewind)
        if verdict.stop is not None:
            return verdict.stop
        assert verdict.to is not None  # without a checkpoint to go back to, the verdict is to stop
        return f"{cause}: back from step {reached:,} to step {verdict.to.step:,}, without the data between"

    def _record_rewind(self, rewind: Rewind) -> None:
        assert rewind.to is not None
        record_rewind(self.run.store, rewind, self.attempt)
        new = rewind.skips[len(self.lost.spans) :]
        self.journal.event(
            "rewind",
            step=rewind.reached,
            to=rewind.to.step,
            attempt_of=rewind.to.attempt,
            began=rewind.began,
            reason=rewind.cause,
            skipped=[list(span) for span in new],
            samples=sum(stop - start for _, _, start, stop in new),
        )


def _gradient_norm_name(update_group: str) -> str:
    return f"{update_group}_grad_norm"
