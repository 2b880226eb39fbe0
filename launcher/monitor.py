"""The monitor: one small Ray actor through which ranks and the driver talk beside the training itself.

Ranks report that they are alive and how far they are; the driver asks how the run stands and says when to stop. It holds
nothing a run needs to continue: if it dies with its node, the next start has a new one.
"""

import time
from dataclasses import dataclass, field
from typing import Any

import ray


@dataclass(frozen=True)
class Fatal:
    """A mistake no restart can cure: what is wrong, and what to do."""

    problem: str
    remedy: str


@dataclass
class Status:
    """What the driver shows and decides on.

    Attributes:
        starts: times a worker group began.
        attempt: the attempt number of the present worker group.
        beats: per rank, (step, what it is doing, when it last said so in seconds since the epoch).
        record: the newest step record.
        evaluation: the newest evaluation record.
        finished: the step at which all ranks ended in good order, None while they run.
        fatal: set once; the worker group must not be restarted.
    """

    starts: int = 0
    attempt: int | None = None
    beats: dict[int, tuple[int, str, float]] = field(default_factory=dict)
    record: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    finished: int | None = None
    fatal: Fatal | None = None


class MonitorState:
    """The actor's body."""

    def __init__(self) -> None:
        self._status = Status()
        self._stop = False

    def started(self, attempt: int) -> None:
        self._status.starts += 1
        self._status.attempt = attempt
        self._status.beats.clear()

    def beat(self, rank: int, step: int, doing: str) -> bool:
        """A sign of life. Returns whether the run should stop at the next step."""
        self._status.beats[rank] = (step, doing, time.time())
        return self._stop

    def record(self, record: dict[str, Any]) -> None:
        if record["kind"] == "evaluation":
            self._status.evaluation = record
        else:
            self._status.record = record

    def note(self, text: str) -> None:
        """A line for the operator."""
        self._status.notes.append(text)

    def finished(self, step: int) -> None:
        self._status.finished = step

    def fail(self, problem: str, remedy: str) -> None:
        """Keep the first; later ones are usually its consequences on other ranks."""
        if self._status.fatal is None:
            self._status.fatal = Fatal(problem, remedy)

    def fatal(self) -> Fatal | None:
        return self._status.fatal

    def stop(self) -> None:
        self._stop = True

    def status(self) -> Status:
        """A snapshot; notes are handed over once."""
        snapshot = self._status
        self._status = Status(**{**vars(snapshot), "notes": [], "beats": dict(snapshot.beats)})
        return snapshot


def start_monitor() -> Any:
    """A handle that travels to the ranks. Lives as long as the driver."""
    return ray.remote(MonitorState).options(num_cpus=0, max_restarts=0).remote()
