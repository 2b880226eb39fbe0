"""The driver's record of one group of ranks: where its ranks run, the errors they raised, and how the group ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.runtime.cluster.orders import RankError
from launcher.runtime.policies.failures import Failure, find_first_failed_node
from launcher.runtime.policies.watchdog import RankHeartbeat


@dataclass
class GroupRecord:
    """What the driver knows of one group of ranks, until the next group starts.

    Attributes:
        attempt: number of the attempt as which the group trains; None until it is claimed.
        beats: latest heartbeat of each rank.
        errors: error of each rank, in the order in which they were reported. The first is usually the cause, but a
            rank that dies without an error makes others raise.
        blamed: the ranks at fault according to an error; empty if the error says that the fault cannot be located;
            None if no error says anything about it.
        stacks: tracebacks of each rank, if it was asked for them and has answered.
        worked: whether the group has finished a step.
        resumed: whether the ranks have reported the step at which they resume.
        hung: whether the group was killed because it was stuck.
        abandoned: whether the group was killed because a stop was requested before its first step.
    """

    attempt: int | None = None
    beats: dict[int, RankHeartbeat] = field(default_factory=dict)
    errors: dict[int, RankError] = field(default_factory=dict)
    blamed: Sequence[int] | None = None
    stacks: dict[int, str] = field(default_factory=dict)
    worked: bool = False
    resumed: bool = False
    hung: bool = False
    abandoned: bool = False

    @property
    def may_save(self) -> bool:
        """Whether the group has a state to save: it has finished a step, or is already saving."""
        return self.worked or any(beat.doing == "saving" for beat in self.beats.values())

    def add_error(self, rank: int, error: RankError) -> None:
        """Record the error with which a rank ended."""
        self.errors[rank] = error
        self.blamed = error.blamed if error.blamed is not None else self.blamed

    @property
    def steps_done(self) -> int:
        """Number of steps that were done when the group ended."""
        return max((beat.step for beat in self.beats.values()), default=0)

    def to_failure(self, failed_ranks: Sequence[int], *, committed: int, now: float) -> Failure:
        """Return the failure of the group, for the failure policy. `committed`: step of the newest checkpoint. `now`:
        seconds since 1970."""
        cause = self.rank_that_raised(failed_ranks)
        kind = "silent" if cause is None else self.errors[cause].kind
        places = {rank: beat.place.node for rank, beat in self.beats.items()}
        errors = {rank: raised.text for rank, raised in self.errors.items()}
        mute = self._silent_ranks(failed_ranks)
        node = find_first_failed_node(places, errors, mute if cause is None else failed_ranks, self.blamed)
        return Failure(
            time=now,
            step=self.steps_done,
            committed=committed,
            worked=self.worked,
            node=None if kind == "transient" else node,
            error=None if cause is None else self.errors[cause].text,
            kind=kind,
        )

    def rank_that_raised(self, failed_ranks: Sequence[int]) -> int | None:
        """Return the rank whose error ended the group; None if a process died without an error, or the group hung."""
        if self.hung or self._silent_ranks(failed_ranks):
            return None
        reporting_ranks = (rank for rank, raised in self.errors.items() if raised.kind != "silent")
        return next(reporting_ranks, None)

    def death_text(self, failed_ranks: Sequence[int]) -> str:
        """Return the line for the operator that says which rank ended the group, and how."""
        cause = self.rank_that_raised(failed_ranks)
        if cause is not None:
            raised = self.errors[cause]
            verb = "could not reach the store" if raised.kind == "transient" else "raised"
            return f"{self._ranks_text([cause])} {verb} at step {self.steps_done:,}: {raised.text}"
        if self.hung:
            return f"the ranks were stuck at step {self.steps_done:,} and were killed"
        who = self._silent_ranks(failed_ranks) or [rank for rank in self.beats if rank not in self.errors]
        return f"{self._ranks_text(who)} died at step {self.steps_done:,} without an error (killed, or machine lost)"

    def _silent_ranks(self, failed_ranks: Sequence[int]) -> list[int]:
        return [rank for rank in failed_ranks if rank not in self.errors]

    def _ranks_text(self, ranks: Sequence[int]) -> str:
        known = {str(self.beats[rank].place) for rank in ranks if rank in self.beats}
        where = f" on {', '.join(sorted(known))}" if known else ""
        if not ranks or len(ranks) == len(self.beats) > 1:
            return f"the ranks{where}"
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}{where}"
