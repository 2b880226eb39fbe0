"""How long a rank was busy in a step, apart from its waiting for others.

All ranks wait for the slowest in the collectives of a backward pass, so the time of a step is the same on all and says
nothing. What differs is what happens between collectives: fetching data, and, at ZeRO stages 0 to 2, the forward pass,
in which nothing is exchanged; it stands for all of a rank's computing. At stage 3 a forward pass gathers weights and
waits like everything else, so slow computing cannot be told by it.
"""

import time
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Pace:
    """One rank's step.

    Attributes:
        data: seconds from the step's begin until its batches were there.
        forward: seconds in forward passes, 0 where they say nothing.
        tokens: that went through them.
    """

    data: float
    forward: float
    tokens: int


class Stopwatch:
    """Adds up the time within `with`: on a GPU that of the kernels, without waiting for them."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._started = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        if self._cuda:
            self._events.append((_event(), _event()))
            self._events[-1][0].record()
        else:
            self._started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        if self._cuda:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._started

    def take(self) -> float:
        """The seconds so far, from 0 again. On a GPU: once the device has done what was timed."""
        if self._cuda and self._events:
            self._events[-1][1].synchronize()
            self._seconds = sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
            self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
