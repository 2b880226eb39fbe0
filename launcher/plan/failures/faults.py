"""Faults of a cluster during a month, drawn at random in the proportions of a published run.

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
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from launcher.runtime.capacity.devices import Cluster

Kind = Literal["rank", "hang", "node", "switch", "notice"]

INTERRUPTIONS: dict[Kind, int] = {"rank": 56, "hang": 7, "node": 321, "switch": 35, "notice": 47}
"""Number of interruptions of Llama 3's 54 days, by kind."""
UNEXPECTED = sum(INTERRUPTIONS.values()) - INTERRUPTIONS["notice"]
SWITCH_NODES = 2
OUTAGES_A_MONTH, OUTAGE_S = 2.0, 1200.0
"""Outages of the store, and their mean length in seconds: together the 43 minutes a month below which Amazon's S3 pays
nothing back (its service level of 99.9 %). Their number is a guess."""
MONTH_S = 30 * 86400.0


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
