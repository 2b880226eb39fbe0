"""The nodes of the Ray cluster: which are being drained, and whether Ray's processes on this node live. Also threads of
actors.

Only this file uses private interfaces of Ray, apart from how a local Ray is started (`data_service.service.tasks`).
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray._private import worker
from ray._private.state import state
from ray.autoscaler.sdk import request_resources

_CORE = ("raylet", "gcs_server")


F = TypeVar("F", bound=Callable[..., Any])


def draining() -> frozenset[str]:
    """Ids of the nodes that will be taken away: preempted by the cloud, or drained by an operator or an autoscaler.

    Ray has no public interface that tells this.
    """
    return frozenset(state.get_draining_nodes())


def lost() -> str | None:
    """Which process of the Ray that was started here has died; None while all live, or if Ray was started elsewhere.

    Ray itself would notice only after about a minute, and until then every call to it hangs.
    """
    for kind, _ in worker._global_node.dead_processes():
        if kind in _CORE:
            return str(kind)
    return None


def logs() -> Path:
    """Ray's log folder on this node."""
    return Path(worker._global_node.get_logs_dir_path())


@contextmanager
def room_for(bundles: Sequence[Mapping[str, float]]) -> Iterator[None]:
    """While this lasts, the cluster's autoscaler, if there is one, provides nodes for all of this at once."""
    request_resources(bundles=[dict(bundle) for bundle in bundles])
    try:
        yield
    finally:
        if lost() is None:
            request_resources(bundles=[])


def staying(going: Container[str]) -> list[dict[str, Any]]:
    """The nodes of `ray.nodes()` that are not `going`. Ray places nothing new on those that are."""
    return [node for node in ray.nodes() if node["NodeID"] not in going]


def on_thread(name: str) -> Callable[[F], F]:
    """Marks an actor's method that has a thread of its own (a concurrency group of Ray)."""
    mark: Callable[[F], F] = ray.method(concurrency_group=name)
    return mark
