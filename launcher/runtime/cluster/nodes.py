"""The nodes of the Ray cluster: how a command joins them, which are being drained, and whether Ray's processes on this
node live."""

import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.autoscaler.sdk import request_resources

from data_service.service.ray_internals import dead_processes, draining_nodes, logs_folder, start_ray


def connect_ray(**init_settings: Any) -> None:
    """Join the cluster in RAY_ADDRESS, or start a Ray on this machine with the settings `init_settings` of
    `ray.init`."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "20")  # s, then Ray ends this process
    start_ray(**init_settings)


def draining_node_ids() -> frozenset[str]:
    """Return the ids of the nodes that are about to leave the cluster: preempted by the cloud, or drained by an
    operator or an autoscaler."""
    return draining_nodes()


def dead_process() -> str | None:
    """Return which of the Ray processes that this process started has died; None while all live, or if Ray was started
    elsewhere."""
    return next(iter(dead_processes()), None)


def ray_log_folder() -> Path:
    """Return Ray's log folder on this node."""
    return logs_folder()


@contextmanager
def request_nodes(bundles: Sequence[Mapping[str, float]]) -> Iterator[None]:
    """Ask the cluster's autoscaler, if there is one, for nodes that hold all `bundles` at once, inside the `with`
    block."""
    request_resources(bundles=[dict(bundle) for bundle in bundles])
    try:
        yield
    finally:
        if dead_process() is None:
            request_resources(bundles=[])


def nodes_except(departing_node_ids: Container[str]) -> list[dict[str, Any]]:
    """Return the nodes of `ray.nodes()` that are not in `departing_node_ids`, the ids of nodes on which Ray places
    nothing new."""
    return [node for node in ray.nodes() if node["NodeID"] not in departing_node_ids]
