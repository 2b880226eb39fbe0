"""Processes forked from a server that has imported everything: a rank starts in milliseconds, not in four seconds.

They are as separate as started ones: own memory, own signals, an exit code that tells of a signal. `run_ranks` joins
them by gloo and returns what they return; `forked` makes a single one.
"""

import gc
import os
import tempfile
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

CONTEXT = get_context("forkserver")
# Only what is installed: the server does not know the tests' own folders.
CONTEXT.set_forkserver_preload(
    [
        "launcher.runtime.rank.main",
        "launcher.runtime.rank.journal",
        "checkpoints.gather",
        "checkpoints.hf.load",
        "data_service.store.s3",
        "torch._dynamo",  # an optimizer imports it, in two seconds
    ]
)


def forked(function: Callable[..., None], *args: Any, output: Path | None = None) -> ForkServerProcess:
    """A process that will call `function(*args)` with this process's environment, and write what it prints to
    `output` if given. `function` must be importable by name."""
    return CONTEXT.Process(target=_call, args=(function, args, dict(os.environ), output))


def enter(environment: dict[str, str]) -> None:
    """Take over the environment of the process that asked: the server has that of its first start. DeepSpeed
    collects garbage again and again; what the server imported need not be looked through each time."""
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)


def _call(
    function: Callable[..., None], args: tuple[Any, ...], environment: dict[str, str], output: Path | None
) -> None:
    enter(environment)
    if output is not None:
        log = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
    function(*args)


def run_ranks(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """`function(rank, world, *args)` on `world` processes; what they return, in rank order.

    They may return plain data and NumPy arrays. `function` must be importable by name (put it in a module under
    tests/support). A rank that raises fails the call.
    """
    results: Queue[tuple[int, Any]] = CONTEXT.Queue()
    with tempfile.TemporaryDirectory() as folder:
        meeting = os.path.join(folder, "meet")
        orders = (function, world, meeting, results, dict(os.environ), args)
        running = start_processes(_enter, orders, nprocs=world, join=False, start_method="forkserver")
        assert running is not None
        found: dict[int, Any] = {}
        while not running.join(timeout=0.05):
            _drain(results, found)
        while len(found) < world:
            rank, value = results.get(timeout=10)
            found[rank] = value
    return [found[rank] for rank in range(world)]


def run_cases(function: Callable[..., Any], world: int, *args: Any) -> list[list[Any]]:
    """As `run_ranks`, of a function that returns a list with a result of each case: by case, what the ranks return."""
    return [list(ranks) for ranks in zip(*run_ranks(function, world, *args), strict=True)]


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
