"""The machines of a simulated month: which are there, what happens to them and when."""

from collections.abc import Iterable, Mapping, Sequence
from heapq import heappop, heappush
from math import inf

from launcher.plan.failures.faults import Fault
from launcher.runtime.cluster.world_size import Nodes

NODE_BACK_S = 1800.0  # until a lost node, or another in its place, is there; a guess


class Machines:
    """Nodes, by number, and the faults that are to come.

    Args:
        count: number of nodes.
        resources: what each node has, by the name of the resource.
        faults: the faults to come, in order of time.

    Attributes:
        there: the nodes that are in the cluster.
        changed: time when a node last came back.
    """

    def __init__(self, count: int, resources: Mapping[str, float], faults: Sequence[Fault]) -> None:
        self.there = set(range(count))
        self.changed = 0.0
        self._resources = resources
        self._coming = list(reversed(faults))
        self._back: list[tuple[float, int]] = []

    def next_event(self) -> float:
        """Return the time of the next fault or return of a node; infinite if there is none."""
        fault = self._coming[-1].at if self._coming else inf
        return min(fault, self._back[0][0] if self._back else inf)

    def happen(self, now: float) -> Fault | None:
        """Let nodes return that are due at `now`. Return the first fault that is due, and forget it; None if none
        is."""
        while self._back and self._back[0][0] <= now:
            self.changed, node = heappop(self._back)
            self.there.add(node)
        return self._coming.pop() if self._coming and self._coming[-1].at <= now else None

    def release(self, nodes: Iterable[int], now: float) -> None:
        """Take nodes out of the cluster until they are back."""
        for node in self.there.intersection(nodes):
            self.there.remove(node)
            heappush(self._back, (now + NODE_BACK_S, node))

    def listing(self, named: Iterable[int]) -> Nodes:
        """Return the cluster in the form of `ray.nodes()`. Only the `named` nodes have an entry each. One entry stands
        for all others: that is the same for those who count places, and does not take a second a month."""
        single = self.there.intersection(named)
        others = len(self.there) - len(single)
        rest = {name: amount * others for name, amount in self._resources.items()}
        return [
            {"NodeID": "others", "Alive": True, "Resources": rest},
            *({"NodeID": str(node), "Alive": True, "Resources": self._resources} for node in sorted(single)),
        ]
