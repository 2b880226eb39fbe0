"""Pieces of a simulated month: an uninterrupted stretch of training, the layout of ranks, a set of copies in memory."""

from dataclasses import dataclass, field
from functools import lru_cache

from launcher.runtime.policies.recovery import partners

Seat = tuple[int, int]
"""A rank's node and its place there."""
_partners = lru_cache(maxsize=4)(partners)


@dataclass(frozen=True)
class Layout:
    """`count` ranks on `nodes`, in order, `each` on one node; the last node may have fewer."""

    nodes: tuple[int, ...]
    each: int
    count: int

    def seats(self) -> list[Seat]:
        """Return the seat of every rank."""
        return [(node, place) for node in self.nodes for place in range(self.each)][: self.count]

    def on(self, node: int) -> set[Seat]:
        """Return the seats on `node`."""
        if node not in self.nodes:
            return set()
        last = self.count - self.each * (len(self.nodes) - 1)
        return {(node, place) for place in range(last if node == self.nodes[-1] else self.each)}


@dataclass
class MemoryCopy:
    """A complete set of copies of one step: the work that it holds, and the nodes that have gone since. A copy outlives
    the process of its rank."""

    work: float
    layout: Layout
    gone: set[int] = field(default_factory=set)

    def whole(self) -> bool:
        """Return whether each rank's part is still on a node. A partner is on another node, so while only one of
        several nodes is gone, no partner has to be looked up."""
        gone = self.gone.intersection(self.layout.nodes)
        if len(gone) <= (len(self.layout.nodes) > 1):
            return True
        nodes = [node for node, _ in self.layout.seats()]
        keepers = _partners(tuple(map(str, nodes)))
        return all(nodes[keepers[rank]] not in gone for rank, node in enumerate(nodes) if node in gone)


@dataclass(frozen=True)
class Segment:
    """Training without interruption: after every `interval` seconds a save blocks it for `blocked` seconds.

    Attributes:
        begin: time at which it begins.
        work: work done by then, in seconds at the speed of all ranks.
        speed: work done in a second of training.
    """

    begin: float
    work: float
    speed: float
    interval: float
    blocked: float

    def trained(self, now: float) -> float:
        """Return the seconds of training until `now`, saves apart."""
        whole, rest = divmod(now - self.begin, self.interval + self.blocked)
        return whole * self.interval + min(rest, self.interval)

    def done(self, now: float) -> float:
        """Return the work done until `now`."""
        return self.work + self.speed * self.trained(now)

    def saved(self, number: int) -> tuple[float, float]:
        """Return the time at which save `number`, from 1, no longer blocks training, and the work that it holds."""
        end = self.begin + number * (self.interval + self.blocked)
        return end, self.work + self.speed * number * self.interval
