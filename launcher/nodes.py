"""The nodes of the Ray cluster that this process is part of, those that are about to go; threads of actors."""

from collections.abc import Callable, Container
from typing import Any, TypeVar

import ray
from ray._private.state import state

F = TypeVar("F", bound=Callable[..., Any])


def draining() -> frozenset[str]:
    """Ids of the nodes that will be taken away: preempted by the cloud, or drained by an operator or an autoscaler.

    Ray Train asks in the same way: there is no public one.
    """
    return frozenset(state.get_draining_nodes())


def staying(going: Container[str]) -> list[dict[str, Any]]:
    """As `ray.nodes()` tells of them, those that are not `going`. Ray places nothing new on one that is."""
    return [node for node in ray.nodes() if node["NodeID"] not in going]


def on_thread(name: str) -> Callable[[F], F]:
    """Marks a method of an actor that has a thread of its own for calls of this kind (a concurrency group of Ray)."""
    mark: Callable[[F], F] = ray.method(concurrency_group=name)
    return mark
