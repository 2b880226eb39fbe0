"""What the coordinator knows of one group of ranks: where they run, what they raised, how the group ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from launcher.runtime.policies.failures import Failure, Kind, where_it_began
from launcher.runtime.policies.watchdog import Beat, RankLocation, next_beat


@dataclass(frozen=True)
class Raised:
    """How a rank ended.

    Attributes:
        text: type and text of the error.
        kind: `silent` if it only shows that another process has died.
        trace: the traceback.
    """

    text: str
    kind: Kind
    trace: str = ""


@dataclass
class Group:
    """From the moment that ranks may start until the next may.

    Attributes:
        beats: per rank, its newest sign of life.
        errors: per rank, in the order in which they came. The first is usually the cause, but a rank that dies without
            a word makes others raise.
        blamed: the ranks whose fault it was, if anybody could tell; empty if it is known that nobody can.
        stacks: what the threads of ranks do; None while nobody wants to know.
        granted: it may start, and whether it came to its end is not known yet.
        running: it was let in, and its end is not judged yet.
        excused: it ends by raising, and yet nobody failed.
        worked: it has finished a step.
        resumed: it has said from where it goes on.
        hung: it was killed because it was stuck.
    """

    beats: dict[int, Beat] = field(default_factory=dict)
    errors: dict[int, Raised] = field(default_factory=dict)
    blamed: Sequence[int] | None = None
    stacks: dict[int, str] | None = None
    granted: bool = False
    running: bool = False
    excused: bool = False
    worked: bool = False
    resumed: bool = False
    hung: bool = False

    def heard(self, rank: int, step: int, doing: str, done: int, place: RankLocation) -> None:
        """A sign of life."""
        self.beats[rank] = next_beat(self.beats.get(rank), Beat(1, step, doing, done, place))

    def asked(self, rank: int) -> bool:
        """Return whether the rank is to send what its threads are doing."""
        return self.stacks is not None and rank not in self.stacks

    def died(self, failed: Sequence[int]) -> bool:
        """Return whether the group is over and its end must be judged. `failed`: the ranks that ended it, as Ray
        tells."""
        return self.running or (self.granted and bool(failed) and not self.excused)

    @property
    def step(self) -> int:
        """Steps done when it ended."""
        return max((beat.step for beat in self.beats.values()), default=0)

    def failure(self, failed: Sequence[int], *, committed: int, now: float) -> Failure:
        """Return how the group ended, as the failure policy wants it. `committed`: steps of the newest checkpoint;
        `now`: seconds since 1970."""
        cause = self.cause(failed)
        kind = "silent" if cause is None else self.errors[cause].kind
        places = {rank: beat.place.node for rank, beat in self.beats.items()}
        errors = {rank: raised.text for rank, raised in self.errors.items()}
        mute = self._mute(failed)
        node = where_it_began(places, errors, mute if cause is None else failed, self.blamed)
        return Failure(
            time=now,
            step=self.step,
            committed=committed,
            worked=self.worked,
            node=None if kind == "transient" else node,
            error=None if cause is None else self.errors[cause].text,
            kind=kind,
        )

    def cause(self, failed: Sequence[int]) -> int | None:
        """Return the rank whose error ended the group; None if a process died without an error."""
        if self.hung or self._mute(failed):
            return None
        told = (rank for rank, raised in self.errors.items() if raised.kind != "silent")
        return next(told, None)

    def epitaph(self, failed: Sequence[int]) -> str:
        """Return which rank ended the group and how, as a line for the operator."""
        cause = self.cause(failed)
        if cause is not None:
            raised = self.errors[cause]
            verb = "was failed by the store" if raised.kind == "transient" else "raised"
            return f"{self._named([cause])} {verb} at step {self.step:,}: {raised.text}"
        if self.hung:
            return f"the ranks were stuck at step {self.step:,}, and killed"
        who = self._mute(failed) or [rank for rank in self.beats if rank not in self.errors]
        return f"{self._named(who)} died at step {self.step:,} without a word (killed, or its machine lost)"

    def _mute(self, failed: Sequence[int]) -> list[int]:
        """Of the ranks that ended it, those that did not say why."""
        return [rank for rank in failed if rank not in self.errors]

    def _named(self, ranks: Sequence[int]) -> str:
        known = {str(self.beats[rank].place) for rank in ranks if rank in self.beats}
        where = f" on {', '.join(sorted(known))}" if known else ""
        if not ranks or len(ranks) == len(self.beats) > 1:
            return f"the ranks{where}"
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}{where}"
