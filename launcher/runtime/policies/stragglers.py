"""Finds stragglers: ranks for which all others wait. A step takes equally long on every rank, so each rank's own times
are compared.

Per window of steps, a rank's computing time is its time in forward passes for each token, divided by the median of the
other ranks. Its data time is how much longer the step took than it would have with the median rank's data. A rank that
is `ratio` times slower in either, in several windows in a row, is a straggler. It is only reported: a slow rank is
better than a stopped run, and an operator may know the reason.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, PositiveInt

from encoder_core.train.timing import Pace

SUSTAINED = 3  # windows in a row


class Stragglers(BaseModel):
    """When a rank counts as slow.

    Attributes:
        window: steps that are looked at together.
        ratio: how much slower than the others, in three windows in a row.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    window: PositiveInt = 50
    ratio: float = Field(default=1.5, gt=1)


Doing = Literal["data", "compute"]


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow, by how much, and in what."""

    rank: int
    ratio: float
    doing: Doing


@dataclass
class Detector:
    """Is given every step. Reports a rank once when it becomes a straggler, and again only if it has recovered in
    between."""

    settings: Stragglers
    forward: bool
    """Whether forward passes say how fast a rank is (not at ZeRO 3)."""
    _steps: list[tuple[Sequence[Pace], float]] = field(default_factory=list)
    _slow: dict[int, int] = field(default_factory=dict)  # windows in a row, by rank

    def step(self, paces: Sequence[Pace], seconds: float) -> list[Straggler]:
        """What all ranks did in a step that took `seconds`. Returns those that have become stragglers by it."""
        self._steps.append((paces, seconds))
        if len(self._steps) < self.settings.window:
            return []
        window, self._steps = self._steps, []
        slow = [s for s in slowness(window, forward=self.forward) if s.ratio >= self.settings.ratio]
        self._slow = {s.rank: self._slow.get(s.rank, 0) + 1 for s in slow}
        return [s for s in slow if self._slow[s.rank] == SUSTAINED]


def slowness(window: Sequence[tuple[Sequence[Pace], float]], *, forward: bool) -> list[Straggler]:
    """Return how every rank compares with the others over a window, in what it is slower at; empty for one rank."""
    world = len(window[0][0])
    if world < 2:
        return []
    steps = sum(seconds for _, seconds in window)
    data = [sum(paces[rank].data for paces, _ in window) for rank in range(world)]
    compute = [_per_token([paces[rank] for paces, _ in window]) for rank in range(world)] if forward else []
    return [_slower(rank, _late(data, steps, rank), _times(compute, rank)) for rank in range(world)]


def _slower(rank: int, data: float, compute: float) -> Straggler:
    return Straggler(rank, data, "data") if data > compute else Straggler(rank, compute, "compute")


def _late(data: Sequence[float], steps: float, rank: int) -> float:
    """Return what the steps took over what they would have taken, had this rank's data come when the others' did."""
    excess = data[rank] - _others(data, rank)
    return steps / max(steps - excess, 1e-9) if excess > 0 else 1.0


def _times(compute: Sequence[float | None], rank: int) -> float:
    """This rank's time for a token over the others'; 1 where nothing is known."""
    mine, known = compute[rank] if compute else None, [c for c in compute if c is not None]
    if mine is None or len(known) < 2:
        return 1.0
    others = [c for number, c in enumerate(compute) if number != rank and c is not None]
    return mine / max(median(others), 1e-12)


def _others(values: Sequence[float], rank: int) -> float:
    return median(value for number, value in enumerate(values) if number != rank)


def _per_token(paces: Sequence[Pace]) -> float | None:
    """Seconds; None for a rank that had no tokens."""
    tokens = sum(pace.tokens for pace in paces)
    return sum(pace.forward for pace in paces) / tokens if tokens else None
