"""The monitor: one small Ray actor through which ranks and the driver talk beside the training itself.

Ranks report that they are alive and how far they are; the driver asks how the run stands and says when to stop.
It holds nothing a run needs to continue: if it dies with its node, the next start has a new one.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import ray

from checkpoints.attempt import Attempt, Heartbeat, Owner, claim
from launcher.watchdog import Beat, Place

STUCK_STARTS = 3


@dataclass(frozen=True)
class Fatal:
    """A mistake no restart can cure: what is wrong, and what to do."""

    problem: str
    remedy: str


@dataclass(frozen=True)
class Orders:
    """What a rank hears in answer to a sign of life: end after this step; send what every thread is doing."""

    stop: bool
    stacks: bool


@dataclass
class Progress:
    """Starts without a finished step between them."""

    starts: int = 0

    def stuck(self) -> bool:
        """Counts one more start; True if too many have come to nothing."""
        self.starts += 1
        return self.starts > STUCK_STARTS

    def step_done(self) -> None:
        self.starts = 0


@dataclass
class Status:
    """What the driver shows and decides on.

    Attributes:
        starts: times a worker group began.
        attempt: the attempt number of the present worker group.
        beats: per rank, its last sign of life.
        record: the newest step record.
        evaluation: the newest evaluation record.
        finished: the step at which all ranks ended in good order, None while they run.
        fatal: set once; the worker group must not be restarted.
    """

    starts: int = 0
    attempt: int | None = None
    beats: dict[int, Beat] = field(default_factory=dict)
    record: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    finished: int | None = None
    fatal: Fatal | None = None


class MonitorState:
    """The actor's body. It claims the attempts after the first, in the driver's name, and beats for the newest."""

    def __init__(self, attempt: Attempt, owner: Owner) -> None:
        self._store, self._owner = attempt.store, owner
        self._first: Attempt | None = attempt
        self._heart: Heartbeat | None = None
        self._status = Status()
        self._stop = False
        self._stacks: dict[int, str] | None = None  # None while nobody wants them
        self._progress = Progress()

    def enter(self) -> int | None:
        """A group of ranks starts: the number of its attempt; None if no start can cure what ended the last one."""
        if self._progress.stuck():
            self.fail(
                f"the ranks died {STUCK_STARTS} times in a row before finishing a step",
                "see the errors above; after mending, the same command resumes the run",
            )
        if self._status.fatal is not None:
            return None
        attempt, self._first = self._first or claim(self._store, owner=self._owner), None
        if self._heart is not None:
            self._heart.__exit__()
        self._heart = Heartbeat(attempt)
        self._heart.__enter__()
        self._status.starts += 1
        self._status.attempt = attempt.number
        self._status.beats.clear()
        self._stacks = None
        self._status.finished = None
        return attempt.number

    def beat(self, rank: int, step: int, doing: str, place: Place) -> Orders:
        """A sign of life."""
        now, last = time.time(), self._status.beats.get(rank)
        known = last is not None and last.place == place
        self._status.beats[rank] = (
            last.again(step, doing, now) if last is not None and known else Beat(step, doing, now, now, place)
        )
        return Orders(self._stop, self._stacks is not None and rank not in self._stacks)

    def want_stacks(self) -> None:
        """From now on, ask every rank what its threads are doing."""
        self._stacks = {}

    def stack(self, rank: int, text: str) -> None:
        """A rank's answer."""
        if self._stacks is not None:
            self._stacks[rank] = text

    def stacks(self) -> dict[int, str]:
        """The answers so far."""
        return dict(self._stacks or {})

    def record(self, record: dict[str, Any]) -> None:
        if record["kind"] == "evaluation":
            self._status.evaluation = record
        else:
            self._status.record = record
            self._progress.step_done()

    def note(self, text: str) -> None:
        """A line for the operator."""
        self._status.notes.append(text)

    def finish(self, step: int) -> None:
        self._status.finished = step

    def fail(self, problem: str, remedy: str) -> None:
        """Keep the first; later ones are usually its consequences on other ranks."""
        if self._status.fatal is None:
            self._status.fatal = Fatal(problem, remedy)

    def stop(self) -> None:
        self._stop = True

    def status(self) -> Status:
        """A snapshot; notes are handed over once."""
        snapshot = self._status
        self._status = Status(**{**vars(snapshot), "notes": [], "beats": dict(snapshot.beats)})
        return snapshot


def start_monitor(attempt: Attempt, owner: Owner) -> Any:
    """A handle that travels to the ranks. Lives as long as the driver."""
    return ray.remote(MonitorState).options(num_cpus=0, max_restarts=0).remote(attempt, owner)
