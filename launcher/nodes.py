"""The nodes of the Ray cluster that this process is part of, and those of them that are about to go."""

from collections.abc import Container
from typing import Any

import ray
from ray._private.state import state


def draining() -> frozenset[str]:
    """Ids of the nodes that will be taken away: preempted by the cloud, or drained by an operator or an autoscaler.

    Ray Train asks in the same way: there is no public one.
    """
    return frozenset(state.get_draining_nodes())


def staying(going: Container[str]) -> list[dict[str, Any]]:
    """As `ray.nodes()` tells of them, those that are not `going`. Ray places nothing new on one that is."""
    return [node for node in ray.nodes() if node["NodeID"] not in going]
