"""Finds stragglers: ranks for which all others wait. A step takes equally long on every rank, so the comparison uses
the time that each rank spends in its own forward passes and in waiting for its own data.

Two ratios are computed for each rank in each window of steps. Compute: its seconds of forward passes per token, divided
by the median of the other ranks. Data: the duration of the steps, divided by the duration that they would have had if
the rank had waited for data only as long as the median of the others. If either is at least `ratio` in several windows
in a row, the rank is a straggler. It is only reported: a slow rank is better than a stopped run.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from pydantic import Field, PositiveInt

from data_service.formats import StrictRecord
from encoder_core.train.settings import Pace

SLOW_WINDOWS = 3  # a rank is a straggler after this many slow windows in a row


class Stragglers(StrictRecord):
    """Settings of the search for stragglers.

    Attributes:
        window: number of steps over which times are summed.
        ratio: a rank that is this many times slower than the others, in three windows in a row, is reported.
    """

    window: PositiveInt = 50
    ratio: float = Field(default=1.5, gt=1)


SlowActivity = Literal["data", "compute"]


@dataclass(frozen=True)
class Straggler:
    """A slow rank: it is `ratio` times slower than the others in `doing` (waiting for data, or computing)."""

    rank: int
    ratio: float
    doing: SlowActivity


@dataclass
class StragglerDetector:
    """Detects stragglers from the times of every step (`add_step`). It reports a rank once when it becomes a straggler,
    and again only if it has recovered in between."""

    settings: Stragglers
    forward: bool
    """Whether the time of forward passes shows how fast a rank is. At ZeRO 3 it does not."""
    _steps: list[tuple[Sequence[Pace], float]] = field(default_factory=list)  # by step: times of all ranks, duration
    _slow: dict[int, int] = field(default_factory=dict)  # number of slow windows in a row, by rank

    def add_step(self, paces: Sequence[Pace], seconds: float) -> list[Straggler]:
        """Add the times of all ranks in a step that took `seconds`. Return the ranks that became stragglers."""
        self._steps.append((paces, seconds))
        if len(self._steps) < self.settings.window:
            return []
        window, self._steps = self._steps, []
        slow = [s for s in rank_slowness(window, forward=self.forward) if s.ratio >= self.settings.ratio]
        self._slow = {s.rank: self._slow.get(s.rank, 0) + 1 for s in slow}
        return [s for s in slow if self._slow[s.rank] == SLOW_WINDOWS]


def rank_slowness(window: Sequence[tuple[Sequence[Pace], float]], *, forward: bool) -> list[Straggler]:
    """Return how many times slower than the others each rank was in a window of steps: the larger of its two ratios,
    data and compute (module docstring). The list is empty if there is only one rank.

    Args:
        window: for each step, the times of all ranks and the step's duration in seconds.
        forward: as in `StragglerDetector`.
    """
    world = len(window[0][0])
    if world < 2:
        return []
    steps = sum(seconds for _, seconds in window)
    data = [sum(paces[rank].data for paces, _ in window) for rank in range(world)]
    compute = [_seconds_per_token([paces[rank] for paces, _ in window]) for rank in range(world)] if forward else []
    return [
        _worse_slowness(rank, _data_delay(data, steps, rank), _compute_slowdown(compute, rank)) for rank in range(world)
    ]


def _worse_slowness(rank: int, data_delay: float, slowdown: float) -> Straggler:
    return Straggler(rank, data_delay, "data") if data_delay > slowdown else Straggler(rank, slowdown, "compute")


def _data_delay(data: Sequence[float], steps: float, rank: int) -> float:
    """Return the duration of the steps, divided by what it would be if the rank had waited for data only as long as the
    median of the others."""
    excess = data[rank] - _median_of_others(data, rank)
    return steps / max(steps - excess, 1e-9) if excess > 0 else 1.0


def _compute_slowdown(compute: Sequence[float | None], rank: int) -> float:
    """Return the rank's seconds per token, divided by the median of the other ranks; 1 if either is unknown."""
    mine, known = compute[rank] if compute else None, [c for c in compute if c is not None]
    if mine is None or len(known) < 2:
        return 1.0
    others = [c for number, c in enumerate(compute) if number != rank and c is not None]
    return mine / max(median(others), 1e-12)


def _median_of_others(values: Sequence[float], rank: int) -> float:
    return median(value for number, value in enumerate(values) if number != rank)


def _seconds_per_token(paces: Sequence[Pace]) -> float | None:
    """Return the seconds of forward passes per token of one rank; None if it had no tokens."""
    tokens = sum(pace.tokens for pace in paces)
    return sum(pace.forward for pace in paces) / tokens if tokens else None
