"""The nodes of Ray's cluster: which are about to go, what this one runs of Ray; threads of actors.

The only file that uses private things of Ray, but for how one is started (`data_service.service.tasks`).
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

    There is no public way to ask.
    """
    return frozenset(state.get_draining_nodes())


def lost() -> str | None:
    """What has died of the Ray that this process has started; None while it lives, or if somebody else started it.

    Without it nothing can be asked of Ray, which itself would notice after a minute or so."""
    for kind, _ in worker._global_node.dead_processes():
        if kind in _CORE:
            return str(kind)
    return None


def logs() -> Path:
    """Ray's log folder on this node."""
    return Path(worker._global_node.get_logs_dir_path())


@contextmanager
def room_for(bundles: Sequence[Mapping[str, float]]) -> Iterator[None]:
    """While this lasts, an autoscaler of the cluster, if there is one, makes and keeps room for so much at once."""
    request_resources(bundles=[dict(bundle) for bundle in bundles])
    try:
        yield
    finally:
        if lost() is None:
            request_resources(bundles=[])


def staying(going: Container[str]) -> list[dict[str, Any]]:
    """As `ray.nodes()` tells of them, those that are not `going`. Ray places nothing new on one that is."""
    return [node for node in ray.nodes() if node["NodeID"] not in going]


def on_thread(name: str) -> Callable[[F], F]:
    """Marks a method of an actor that has a thread of its own for calls of this kind (a concurrency group of Ray)."""
    mark: Callable[[F], F] = ray.method(concurrency_group=name)
    return mark
