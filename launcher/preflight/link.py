"""How fast data comes from another node: one message around the ring of nodes, timed where it arrives."""

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

_BYTES = 2 << 20  # 20 ms where it is too slow; 2 s where it is hopeless
_WARM_UP = 1024  # connections are made when they are first used


def incoming_speed(group: dist.ProcessGroup, rank: int, leaders: Sequence[int]) -> tuple[float, int] | None:
    """Bytes a second from the node before this one in the ring, and the rank that sent them.

    Called by one rank of each node, `leaders`, in the same order on all; None if there is one node only.
    """
    if len(leaders) < 2:
        return None
    place = leaders.index(rank)
    before, after = leaders[place - 1], leaders[(place + 1) % len(leaders)]
    _pass_on(group, before, after, _WARM_UP)
    return _BYTES / _pass_on(group, before, after, _BYTES), before


def _pass_on(group: dist.ProcessGroup, before: int, after: int, size: int) -> float:
    """Seconds until the message of the one before is here, from when ours went out."""
    ours, theirs = torch.zeros(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    started = time.perf_counter()
    sending = dist.isend(ours, group=group, group_dst=after)
    receiving = dist.irecv(theirs, group=group, group_src=before)
    assert sending is not None
    assert receiving is not None
    receiving.wait()
    seconds = time.perf_counter() - started
    sending.wait()
    return seconds
