"""How a run gets over the death of a rank quickly: the settings, and which rank keeps the copy of another rank's state
in memory.

Who keeps whose copy is a pure function of the nodes on which the ranks run. The ranks are written around a ring, node
after node, and each rank's copy lies a fixed distance further on. Any distance from the size of the largest node to the
rest of the ring leads to another node, and gives each rank one copy to keep. The distance is about half the ring:

- Nodes that share a switch or a rack are mostly neighbours in the ring, and are lost together. Their copies lie on
  the other side.
- With an even number of equal nodes, two nodes keep each other's copies. Of all placements of one copy this one
  survives the loss of two nodes most often (Wang et al. 2023, "Gemini: fast failure recovery in distributed training
  with in-memory checkpoints", section 4).
- With equal nodes, a rank and its partner have the same place on their nodes, so on networks that have a switch for
  each place (rails) a copy crosses one switch.

If a node holds more than half of all ranks, the ranks of the other nodes keep more than one copy each.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from data_service.formats import StrictRecord

COPY_TIME_SHARE = 0.0003
"""Share of the time that copies of the state in memory take at most with `memory_every: auto`. In simulated months of
RoBERTa-large on 16 to 16,384 GPUs, also of which a node lasts a day, the goodput was nowhere better at 0.3 %: those
copies cost more than the steps that they saved."""


PROCESS_BYTES = 2 << 30  # host memory that each rank or spare process of a node needs


class Recovery(StrictRecord):
    """What a run holds ready, so that the death of a rank costs little time.

    Attributes:
        spares: largest number of processes on each node that have loaded the libraries and wait for a rank to die. Each
            costs the memory of a process that has imported torch, about 0.5 GB, and no GPU memory. All but the first
            are made only where Ray's memory of the node is at least 2 GiB for each rank and spare process.
        memory_every: number of steps after which the ranks copy their state to the memory of their node and of another
            node. "auto": as often as it takes at most 0.03 % of the time. "never": a restart reads the last checkpoint.
    """

    spares: NonNegativeInt = 2  # the second is ready while the first is being replaced
    memory_every: PositiveInt | Literal["auto", "never"] = "auto"


def spare_counts(
    ranks_by_node: Mapping[str, int], memory_by_node: Mapping[str, float], max_spares: int
) -> dict[str, int]:
    """Return how many spare processes each node with `ranks_by_node` is to have: at most `max_spares`, and one at
    most where the node's bytes of `memory_by_node` are fewer than `PROCESS_BYTES` for every rank and spare
    process."""
    room = {node: int(memory_by_node.get(node, 0.0) // PROCESS_BYTES) - count for node, count in ranks_by_node.items()}
    return {node: min(max_spares, max(1, free)) for node, free in room.items()}


def copy_partners(nodes: Sequence[str]) -> list[int]:
    """Return for each rank the rank that keeps the copy of its state.

    The partner is on another node if there is another. Numbers of copies differ between ranks only as far as the
    sizes of the nodes make it necessary. On a single node the partner is the next rank; a single rank is its own.

    Args:
        nodes: the node of each rank.
    """
    if len(set(nodes)) < 2:
        return [(rank + 1) % len(nodes) for rank in range(len(nodes))]
    first = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
    ring = sorted(range(len(nodes)), key=lambda rank: (first[nodes[rank]], rank))
    groups = [list(ranks) for _, ranks in groupby(ring, key=lambda rank: nodes[rank])]
    largest = max(groups, key=len)
    others = [rank for rank in ring if nodes[rank] != nodes[largest[0]]]
    if len(largest) > len(others):
        pairs = _partners_of_large_node(largest, others)
    else:
        half = len(ring) // 2
        distance = half - half % len(largest)  # a multiple of a node's ranks, if all nodes are equal
        pairs = {rank: ring[(at + distance) % len(ring)] for at, rank in enumerate(ring)}
    return [pairs[rank] for rank in range(len(nodes))]


def _partners_of_large_node(large_node_ranks: Sequence[int], other_ranks: Sequence[int]) -> dict[int, int]:
    """Return the partner of each rank if the node of the `large_node_ranks` group has more ranks than all other
    nodes together. `other_ranks`: the ranks of these nodes. Each of them keeps the copies of several ranks."""
    kept_by_others = {rank: other_ranks[at % len(other_ranks)] for at, rank in enumerate(large_node_ranks)}
    return kept_by_others | dict(zip(other_ranks, large_node_ranks, strict=False))
