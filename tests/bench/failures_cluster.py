"""A cluster in simulated time: its faults, drawn at random in the proportions of a published run, and what they hit:
machines, ranks, copies in memory, stretches of training.

Llama 3 405B ("The Llama 3 Herd of Models", 2024, section 3.3.4 and table 5) was interrupted 466 times in 54 days on
16,384 H100: 47 times as planned, 419 times not. The table's rows are put together here by what each takes away:

- a rank: software bugs 54, dependencies 2. The process ends, its node is well.
- a hang: time limits of NCCL's watchdog 7.
- a node: everything of one machine, 321. Its memory counts as lost, though most faults of a GPU leave it.
- a switch: switches and cables 35. In that cluster two nodes of one rack share the first switch (section 3.3.1).
- a notice: planned maintenance, 47. The node is drained first.

Outages of the store come beside them. Faults are independent, at constant rates.
"""

import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from heapq import heappop, heappush
from typing import Literal

from launcher.runtime.capacity.devices import Cluster
from launcher.runtime.cluster.resources import Nodes
from launcher.runtime.policies.recovery import copy_partners
from launcher.runtime.policies.watchdog import heartbeat_interval_s

Kind = Literal["rank", "hang", "node", "switch", "notice"]

INTERRUPTIONS: dict[Kind, int] = {"rank": 56, "hang": 7, "node": 321, "switch": 35, "notice": 47}
"""Number of interruptions of Llama 3's 54 days, by kind."""
UNEXPECTED = sum(INTERRUPTIONS.values()) - INTERRUPTIONS["notice"]
SWITCH_NODES = 2
OUTAGES_A_MONTH, OUTAGE_S = 2.0, 1200.0
"""Outages of the store, and their mean length in seconds: together the 43 minutes a month below which Amazon's S3 pays
nothing back (its service level of 99.9 %). Their number is a guess."""
MONTH_S = 30 * 86400.0
NODE_BACK_S = 1800.0  # until a lost node, or another in its place, is there; a guess
NOTICED_S = 0.25
"""Until the driver knows that a process died: Ray says so at once, the driver looks every 0.25 s. The others hear of it
with the answer to their next heartbeat."""
NODE_NOTICED_S = 30.0
"""Until ranks raise because a whole machine is gone: NCCL over InfiniBand tries seven times for 4.3 s (NVIDIA, NCCL's
NCCL_IB_TIMEOUT=20 and NCCL_IB_RETRY_CNT=7)."""
PROCESS_S = 2.6  # new processes with their imports from the page cache; measured, two ranks
SPARE_AGAIN_S = 16.0
"""Until a node has a spare process again: 10 s after the first step, and its imports; measured."""


@dataclass(frozen=True)
class Fault:
    """One interruption.

    Attributes:
        at: seconds since the beginning of the month.
        nodes: numbers of the nodes that it takes away; of a "rank" and a "hang", the node of the rank.
        place: number of the rank on its node; 0 for faults of whole nodes.
    """

    at: float
    kind: Kind
    nodes: tuple[int, ...]
    place: int = 0


@dataclass(frozen=True)
class Outage:
    """A time in which the store does not answer, from `begin` to `end`, in seconds since the month began."""

    begin: float
    end: float


def draw_faults(cluster: Cluster, seed: int, seconds: float = MONTH_S) -> list[Fault]:
    """Return the faults of `cluster` in `seconds`, in order of time: a pure function of its arguments.

    `Cluster.mtbf` is the mean time between interruptions that nobody planned, for one node.
    """
    draw, kinds, weights = random.Random(seed), tuple(INTERRUPTIONS), tuple(INTERRUPTIONS.values())
    rate = cluster.nodes / cluster.mtbf * sum(weights) / UNEXPECTED
    faults = []
    for at in _times(draw, rate, seconds):
        (kind,) = draw.choices(kinds, weights)
        node, place = draw.randrange(cluster.nodes), draw.randrange(cluster.gpus_per_node)
        first = node - node % SWITCH_NODES
        rack = tuple(range(first, min(first + SWITCH_NODES, cluster.nodes)))
        whole = kind in ("node", "switch", "notice")
        faults.append(Fault(at, kind, rack if kind == "switch" else (node,), 0 if whole else place))
    return faults


def draw_outages(seed: int, seconds: float = MONTH_S) -> list[Outage]:
    """Return the store's outages in `seconds`, in order of time. Those that overlap are joined."""
    draw, found = random.Random(f"outages {seed}"), list[Outage]()
    for at in _times(draw, OUTAGES_A_MONTH / MONTH_S, seconds):
        end = at + draw.expovariate(1 / OUTAGE_S)
        if found and at <= found[-1].end:
            found[-1] = Outage(found[-1].begin, max(end, found[-1].end))
        else:
            found.append(Outage(at, end))
    return found


def _times(draw: random.Random, rate: float, seconds: float) -> Iterator[float]:
    """Yield the times of a Poisson process of `rate` events a second."""
    now = draw.expovariate(rate) if rate else math.inf
    while now < seconds:
        yield now
        now += draw.expovariate(rate)


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
        fault = self._coming[-1].at if self._coming else math.inf
        return min(fault, self._back[0][0] if self._back else math.inf)

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


Seat = tuple[int, int]
"""A rank's node and its place there."""
_partners = lru_cache(maxsize=4)(copy_partners)


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


@dataclass(frozen=True)
class Copies:
    """Copies of the state in memory.

    Attributes:
        every: number of steps between two copies.
        stall: seconds that training waits for a copy to the host.
        transfer: seconds until the partner has it, over the whole network of a node.
    """

    every: int
    stall: float
    transfer: float


@dataclass(frozen=True)
class Way:
    """One way to go on after a fault.

    Attributes:
        anew: seconds until all ranks step in new processes, from the time when the fault is noticed; the state apart.
        cold: seconds more if a node takes part that did not before.
        load: seconds to read a checkpoint in the store.
        stay: as `anew`, if the survivors stay; None if they never do.
        process: seconds more if they stay and no spare process is there.
        spares: number of spare processes on each node.
        recall: seconds to read the state in memory.
        copies: the copies in memory; None if there are none.
    """

    name: str
    anew: float
    cold: float
    load: float
    stay: float | None = None
    process: float = PROCESS_S
    spares: int = 1
    recall: float = 0.0
    copies: Copies | None = None


def noticed(kind: Kind, hang: float, ranks: int) -> float:
    """Return the seconds until all of `ranks` ranks have noticed a fault. `hang`: the watchdog's limit of a step."""
    rank = NOTICED_S + heartbeat_interval_s(ranks)
    return {"rank": rank, "hang": hang, "node": NODE_NOTICED_S, "switch": NODE_NOTICED_S, "notice": 0.0}[kind]
