"""The actor in which a rank runs. It gets its seat before it imports torch
(`launcher.runtime.cluster.rank_placement`), so neither this module nor a module that it imports may import torch or
DeepSpeed. Only a spare process imports torch earlier, but it does not call CUDA before it has its seat."""

import ctypes
import gc
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING

import ray

from launcher.runtime.cluster.rank_placement import Placement, Seat, SeatError

if TYPE_CHECKING:
    from launcher.runtime.cluster.orders import Assignment, RankNews, RankOrders, RankResult
    from launcher.runtime.cluster.worker import Rank

CONCURRENCY_GROUPS = {"talks": 1}
"""Ray's concurrency groups of the actor: `talk` runs on its own thread while the rank trains."""
_PR_SET_NAME = 15  # option PR_SET_NAME of prctl(2)
_CUDA_LIBRARIES = ("torch", "deepspeed")  # no other code may import them before the seat is set


def assigned_gpus() -> tuple[str, ...]:
    """Return the GPUs that Ray gave this process, by the names in `CUDA_VISIBLE_DEVICES` when Ray started on this node,
    or as indices if that was not set."""
    return tuple(gpu.strip() for gpu in ray.get_runtime_context().get_accelerator_ids().get("GPU", []))


class RankProcess:
    """The actor in which a rank runs. It is reused for one group after another, unless its own rank fails. The driver's
    calls of `talk` run on a thread of their own (`CONCURRENCY_GROUPS`), whatever the rank computes."""

    def __init__(self) -> None:
        self._loaded = False  # whether this process itself has imported torch
        self._rank: Rank | None = None  # this process as a rank of its present group

    def load(self, run_uri: str, gpus: bool, ranks: int) -> Placement:
        """Prepare this spare process for a rank of the run, and return its placement.

        `gpus`: whether ranks have GPUs. DeepSpeed gets this from DS_ACCELERATOR here; otherwise it would call CUDA,
        which reads `CUDA_VISIBLE_DEVICES` at its first call. `ranks`: number of ranks on this node."""
        os.environ["DS_ACCELERATOR"] = "cuda" if gpus else "cpu"
        self._loaded = True
        with _gc_disabled():
            import launcher.runtime.cluster.worker  # noqa: F401
        from launcher.runtime.cluster.spare_process import prepare_process

        prepare_process(run_uri, gpus=gpus, ranks=ranks)
        return self.placement()

    def placement(self) -> Placement:
        node = ray.get_runtime_context().get_node_id()
        return Placement(node, ray.util.get_node_ip_address(), os.getpid(), assigned_gpus())

    def free_port(self) -> int:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port: int = probe.getsockname()[1]
            return port

    def join(self, group: int, seat: Seat, assignment: "Assignment") -> "RankResult":
        """Take `seat` in group number `group`, and join its other ranks. The environment is set before torch is
        imported; if other code has already imported torch or DeepSpeed, the outcome is a FatalError."""
        began = time.monotonic()
        from launcher.runtime.cluster.orders import FatalError, RankResult

        try:
            if not self._loaded:
                _refuse_loaded_libraries()
        except SeatError as error:
            return RankResult(FatalError(error.problem, error.remedy), stays=False)
        os.environ.update(seat.environment())
        self._loaded = True
        with _gc_disabled():
            from launcher.runtime.cluster.worker import Rank
        if self._rank is not None:  # the earlier group ended before training
            self._rank.leave(group_is_broken=True)
        self._rank = Rank(group, seat, assignment, began)
        _name_thread(f"rank {seat.rank}")
        return self._ended(self._rank.join())

    def train(self, attempt: int) -> "RankResult":
        """Train as a rank of the joined group, as attempt number `attempt`."""
        assert self._rank is not None
        _name_thread(f"rank {self._rank.link.rank}")
        return self._ended(self._rank.train(attempt))

    def _ended(self, end: "RankResult") -> "RankResult":
        """Forget the rank if it has left its group. Return `end`."""
        if self._rank is not None and not self._rank.joined:
            self._rank = None
        return end

    @ray.method(concurrency_group="talks")  # type: ignore[untyped-decorator]
    def talk(self, group: int, orders: "RankOrders") -> "RankNews | None":
        """Pass orders to the rank of group number `group`, and return its news; None if it has not joined that
        group."""
        rank = self._rank
        return rank.link.talk(orders) if rank is not None and rank.group == group else None


def _name_thread(name: str) -> None:
    """Name the current thread, so that `ps -L` and `top -H` show which rank it is. Ray's own title of the process
    changes with every call of `talk`."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


@contextmanager
def _gc_disabled() -> Iterator[None]:
    """Disable garbage collection during the `with` block: imports take a tenth longer with it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _refuse_loaded_libraries() -> None:
    for library in _CUDA_LIBRARIES:
        if library in sys.modules:
            raise SeatError(
                f"{find_importer(library)} has imported {library} into a rank's process before the rank has its GPU",
                remedy=f"start Ray without the code that imports {library} into its workers: sitecustomize, .pth files "
                "or a worker_process_setup_hook",
            )


def find_importer(library: str) -> str:
    """Return the likely importer of `library`: a module outside it that has one of its modules, classes or functions
    as a global. Modules after `library` in `sys.modules` are searched first."""
    names = list(sys.modules)
    place = names.index(library)
    for name in names[place + 1 :] + names[place::-1]:
        if not _is_module_of(name, library) and any(_is_defined_in(value, library) for value in _module_values(name)):
            return name
    return "a function"


def _is_module_of(name: str | None, library: str) -> bool:
    return name is not None and (name == library or name.startswith(f"{library}."))


def _module_values(module: str) -> list[object]:
    return list(getattr(sys.modules[module], "__dict__", {}).values())


def _is_defined_in(value: object, library: str) -> bool:
    if isinstance(value, ModuleType):
        return _is_module_of(value.__name__, library)
    return isinstance(value, type | FunctionType) and _is_module_of(value.__module__, library)
