"""The watchdog: which ranks make no progress, and what is done about it.

Nothing in Ray or NCCL bounds a hang inside a collective. Every rank says once a second where it is, from a thread of
its own: a rank that repeats itself for too long is stuck, a rank that says nothing is frozen or cut off. As all ranks
wait for the slowest, all are stuck soon after one is; the group is killed as a whole, and Ray starts it again.
"""

import sys
import threading
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field


class Watchdog(BaseModel):
    """Seconds without progress after which the ranks are killed and started again.

    Attributes:
        step: in training, for one step.
        other: in anything else: starting, loading, evaluating, saving.
        silence: without any sign of life.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: float = Field(default=600.0, gt=0)
    other: float = Field(default=1800.0, gt=0)
    silence: float = Field(default=120.0, gt=0)


@dataclass(frozen=True)
class Place:
    """Where a rank's process is."""

    node: str
    pid: int


@dataclass(frozen=True)
class Beat:
    """A rank's last sign of life. Times in seconds since 1970, by the monitor's clock.

    Attributes:
        step, doing: where it said it was.
        since: when it first said so.
        heard: when it last said anything.
    """

    step: int
    doing: str
    since: float
    heard: float
    place: Place

    def again(self, step: int, doing: str, now: float) -> "Beat":
        """The next sign of life from the same process."""
        moved = (step, doing) != (self.step, self.doing)
        return Beat(step, doing, now if moved else self.since, now, self.place)


def stuck(beats: Mapping[int, Beat], now: float, limits: Watchdog) -> list[str]:
    """What is wrong, a line a rank, the ranks furthest behind first; empty while all is well."""
    found = [
        (beat.step, rank, problem)
        for rank, beat in beats.items()
        if (problem := _problem(beat, now, limits)) is not None
    ]
    return [f"rank {rank} {problem}" for _, rank, problem in sorted(found)]


def _problem(beat: Beat, now: float, limits: Watchdog) -> str | None:
    where = f"{beat.doing} at step {beat.step}"
    if now - beat.heard > limits.silence:
        return f"has been silent for {now - beat.heard:.0f} s, last {where}"
    if now - beat.since > (limits.step if beat.doing == "training" else limits.other):
        return f"has made no progress for {now - beat.since:.0f} s, {where}"
    return None


def stack_of_every_thread() -> str:
    """What this process is doing, a Python traceback a thread. Works from any thread while the others wait."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = [
        f"thread {names.get(number, number)}\n{''.join(traceback.format_stack(frame))}"
        for number, frame in sys._current_frames().items()
    ]
    return f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}\n\n" + "\n".join(parts)
