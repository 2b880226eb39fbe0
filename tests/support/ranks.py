"""Real ranks for tests: processes joined by gloo, as a launcher would start them, but forked (`forked`)."""

import os
import tempfile
from collections.abc import Callable
from multiprocessing.queues import Queue
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from forked import CONTEXT, enter


def run_ranks(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """`function(rank, world, *args)` on `world` processes; what they return, in rank order.

    They may return plain data and NumPy arrays. `function` must be importable by name (put it in a module under
    tests/support). A rank that raises fails the call.
    """
    results: Queue[tuple[int, Any]] = CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meet")
        orders = (function, world, meeting, results, dict(os.environ), args)
        running = mp.start_processes(_enter, orders, nprocs=world, join=False, start_method="forkserver")
        assert running is not None
        found: dict[int, Any] = {}
        while not running.join(timeout=0.05):
            _drain(results, found)
        while len(found) < world:
            rank, value = results.get(timeout=10)
            found[rank] = value
    return [found[rank] for rank in range(world)]


def _drain(results: "Queue[tuple[int, Any]]", found: dict[int, Any]) -> None:
    while not results.empty():
        rank, value = results.get()
        found[rank] = value


def _enter(
    rank: int,
    function: Callable[..., Any],
    world: int,
    meeting: str,
    results: "Queue[Any]",
    environment: dict[str, str],
    args: tuple[Any, ...],
) -> None:
    enter(environment)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world)
    try:
        results.put((rank, function(rank, world, *args)))
        results.close()
        results.join_thread()
    finally:
        dist.destroy_process_group()
    os._exit(0)  # without the interpreter's own end, in which threads of torch's were seen to abort
