"""The nodes of the Ray cluster: which are being drained, and whether Ray's processes on this node live. Also threads of
actors.
"""

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.autoscaler.sdk import request_resources

from data_service.service.ray_internals import dead_processes, draining_nodes, logs_folder

_CORE = ("raylet", "gcs_server")


F = TypeVar("F", bound=Callable[..., Any])


def draining() -> frozenset[str]:
    """Ids of the nodes that will be taken away: preempted by the cloud, or drained by an operator or an autoscaler."""
    return draining_nodes()


def lost() -> str | None:
    """Return which process of the Ray that was started here has died; None while all live, or if Ray was started
    elsewhere.

    Ray itself would notice only after about a minute, and until then every call to it hangs.
    """
    return next((kind for kind in dead_processes() if kind in _CORE), None)


def logs() -> Path:
    """Ray's log folder on this node."""
    return logs_folder()


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
    """Return the nodes of `ray.nodes()` that are not `going`. Ray places nothing new on those that are."""
    return [node for node in ray.nodes() if node["NodeID"] not in going]


def on_thread(name: str) -> Callable[[F], F]:
    """Marks an actor's method that has a thread of its own (a concurrency group of Ray)."""
    mark: Callable[[F], F] = ray.method(concurrency_group=name)
    return mark
