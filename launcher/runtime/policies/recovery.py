"""Fast recovery from the death of a rank: its settings, and which rank keeps an in-memory copy of which rank's state.

The partners are a pure function of the nodes of the ranks. The ranks form a ring, node after node, and each rank's copy
is kept a fixed number of ranks further on (the distance). Every partner is on another node, and each rank keeps one
copy, if the distance is not below the number of ranks of the largest node, and not above that of all other nodes
together. The distance is about half the ring:

- Nodes that share a switch or a rack are mostly neighbours in the ring, and may be lost together. Their copies are on
  the other side of the ring.
- With an even number of equal nodes, two nodes keep each other's copies. Of all placements of one copy this one
  survives the loss of two nodes most often (Wang et al. 2023, "Gemini: fast failure recovery in distributed training
  with in-memory checkpoints", section 4).
- With equal nodes, a rank and its partner have the same local rank. In a rail-optimised network, which has a switch
  for each local rank, a copy crosses only one switch.

If a node holds more than half of all ranks, the ranks of the other nodes keep more than one copy each.
"""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from data_service.formats import StrictRecord

COPY_TIME_SHARE = 0.0003
"""With `memory_every: auto`, in-memory copies of the state take at most this share of the time. In simulated months of
RoBERTa-large on 16 to 16,384 GPUs, even with nodes that fail once a day, ten times this share never gave better
goodput: the copies cost more time than they saved."""

PROCESS_BYTES = 2 << 30  # host memory that each rank or spare process of a node needs


class Recovery(StrictRecord):
    """Settings of spare processes and in-memory copies, which make the death of a rank cost little time.

    Attributes:
        spares: largest number of spare processes on each node: they have loaded the libraries and wait to replace a
            dead rank. Each takes about 0.5 GB of host memory and no GPU memory. More than one is started only if the
            node's memory, as Ray counts it, is at least 2 GiB for each rank and spare process.
        memory_every: number of steps after which the ranks copy their state to the memory of their node and of another
            node. "auto": as often as possible in 0.03 % of the time. "never": a restart reads the last checkpoint.
    """

    spares: NonNegativeInt = 2  # the second is ready while the first is being replaced
    memory_every: PositiveInt | Literal["auto", "never"] = "auto"


def spare_counts(
    ranks_by_node: Mapping[str, int], memory_by_node: Mapping[str, float], max_spares: int
) -> dict[str, int]:
    """Return how many spare processes to start on each node: at most `max_spares`, and more than one only if the node
    has `PROCESS_BYTES` of memory for every rank and spare process.

    `ranks_by_node`: number of ranks on each node. `memory_by_node`: bytes of host memory of each node."""
    room = {node: int(memory_by_node.get(node, 0.0) // PROCESS_BYTES) - count for node, count in ranks_by_node.items()}
    return {node: min(max_spares, max(1, free)) for node, free in room.items()}


def copy_partners(nodes: Sequence[str]) -> list[int]:
    """Return for each rank its partner: the rank that keeps the copy of its state.

    If there are several nodes, the partner is on another node, and copies are spread as evenly over the ranks as the
    sizes of the nodes allow. On a single node the partner is the next rank; a single rank is its own partner.

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
        distance = half - half % len(largest)  # whole nodes if all nodes are equal: the local rank stays
        pairs = {rank: ring[(at + distance) % len(ring)] for at, rank in enumerate(ring)}
    return [pairs[rank] for rank in range(len(nodes))]


def _partners_of_large_node(large_node_ranks: Sequence[int], other_ranks: Sequence[int]) -> dict[int, int]:
    """Return the partner of each rank when one node (`large_node_ranks`) has more ranks than all other nodes together
    (`other_ranks`). Each rank of `other_ranks` then keeps the copies of one or several ranks of the large node."""
    kept_by_others = {rank: other_ranks[at % len(other_ranks)] for at, rank in enumerate(large_node_ranks)}
    return kept_by_others | dict(zip(other_ranks, large_node_ranks, strict=False))
