"""Keeps the number of a run's ranks for the driver: how many trained before, how many train now, and since when.
`launcher.runtime.policies.elastic` decides how many may start."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.runtime.policies.elastic import Sizing, cause, exclude_nodes, places, rank_count, should_grow

_REMINDER_S = 60.0  # interval of the lines that tell the operator what a start waits for

Nodes = Sequence[Mapping[str, Any]]
"""Nodes, as `ray.nodes()` returns them."""


@dataclass(frozen=True)
class WorldSizeChange:
    """A change of the number of ranks, and its cause."""

    before: int
    world: int
    cause: str


class WorldSizeTracker:
    """A tracker of the number of ranks throughout one command.

    Args:
        sizing: the numbers of ranks that the run may have.
        last: number of ranks that wrote the newest checkpoint; None if there is none.
        clock: function that returns seconds.

    Attributes:
        without: nodes on which no rank may run any more.
    """

    def __init__(self, sizing: Sizing, last: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._sizing, self._world, self._clock = sizing, last, clock
        self.without: frozenset[str] = frozenset()
        self._wanted = max(sizing.expected, last or 0)
        self._first = True
        self._began = 0.0
        self._asked: float | None = None  # time when ranks were first requested; None while a group trains
        self._granted: int | None = None  # number of ranks that may start and do not train yet
        self._failed: int | None = None  # number of ranks that were allowed to start and did not
        self._told: float | None = None
        self._starting: int | None = None  # number of starting ranks in the last message to the operator
        self._found = 0
        self._changed = 0.0  # time when the number of places last changed

    def exclude_nodes(self, nodes: Nodes, bad_nodes: frozenset[str]) -> bool:
        """Exclude the `bad_nodes` nodes, as far as enough places for ranks remain. Return whether all are excluded."""
        self.without = exclude_nodes(nodes, self._sizing, self.without, bad_nodes)
        return bad_nodes <= self.without

    def start(self, nodes: Nodes) -> int | None:
        """Return how many ranks may start now; None: ask again later."""
        found, now = self._count(nodes), self._clock()
        self._asked = now if self._asked is None else self._asked
        self._failed, self._granted = (
            self._granted,
            rank_count(self._sizing, found, self._wanted, now - self._asked),
        )
        return self._granted

    def news(self) -> str | None:
        """Return the line for the operator after a call of `start`; None if there is nothing new. That ranks start is
        told once, that they cannot start is told every `_REMINDER_S` seconds."""
        now = self._clock()
        if self._granted is not None and self._failed is None:
            known, self._starting = self._starting == self._granted, self._granted
            return None if known else f"starting {self._granted} rank{'s' if self._granted > 1 else ''}"
        if self._told is not None and now - self._told < _REMINDER_S:
            return None
        self._told = now
        if self._granted is None:
            return f"waiting for machines: places for {self._found} ranks, {self._target_text()} wanted"
        return f"Ray could not start {self._failed} ranks: a node has just left the cluster, or other jobs fill it"

    def entered(self, world: int) -> WorldSizeChange | None:
        """Note that a group of `world` ranks begins to train. Return the change to record; None if the number is the
        same as before."""
        before, first = self._world, self._first
        self._world = self._wanted = world
        self._first, self._asked, self._told, self._began = False, None, None, self._clock()
        self._granted = self._starting = None
        if before is None or before == world:
            return None
        return WorldSizeChange(before, world, cause(self._sizing, before, world, first=first))

    def should_grow(self, nodes: Nodes) -> bool:
        """Return whether the present ranks should end at a checkpoint so that more can start. It is called every few
        seconds."""
        found, now = self._count(nodes), self._clock()
        if self._world is None:
            return False
        return should_grow(self._sizing, found, self._world, now - self._began, now - self._changed)

    def can_start_now(self, nodes: Nodes) -> bool:
        """Return whether the next group could start without waiting for places."""
        return rank_count(self._sizing, self._count(nodes), self._wanted, 0.0) is not None

    def _count(self, nodes: Nodes) -> int:
        found = places(nodes, self._sizing.each, self.without)
        if found != self._found:
            self._found, self._changed = found, self._clock()
        return found

    def _target_text(self) -> str:
        return (
            str(min(self._wanted, self._sizing.most))
            if self._may_still_wait()
            else f"{self._sizing.least} at least"
        )

    def _may_still_wait(self) -> bool:
        return self._asked is not None and self._clock() - self._asked < self._sizing.wait
