"""Measures how long a rank computed in a step, without its waits for other ranks.

In the collectives of a backward pass all ranks wait for the slowest, so the time of a step is the same on all ranks and
does not show which rank is slow. The times between collectives do: fetching data and, at ZeRO stages 0 to 2, the
forward pass, which has no collectives and stands for all of a rank's computing. At stage 3 the forward pass gathers
weights, and so waits for other ranks, too.
"""

import time

import torch


class Stopwatch:
    """Adds up the time inside `with` blocks. On a GPU it times the kernels, and a block does not wait for them."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._seconds = 0.0
        self._started = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        if self._cuda:
            self._events.append((_cuda_event(), _cuda_event()))
            self._events[-1][0].record()
        else:
            self._started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        if self._cuda:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._started

    def take_seconds(self) -> float:
        """Return the seconds so far, and reset them to 0. On a GPU this waits until the timed kernels have finished."""
        if self._cuda and self._events:
            self._events[-1][1].synchronize()
            self._seconds = sum(begin.elapsed_time(end) for begin, end in self._events) / 1e3
            self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def _cuda_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
