"""The Ray cluster as the driver sees it: connecting, nodes that are being drained, dead Ray processes on this node."""

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
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # leave CUDA_VISIBLE_DEVICES as it is
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "20")  # seconds; then Ray ends this process
    start_ray(**init_settings)


def draining_node_ids() -> frozenset[str]:
    """Return the ids of the nodes that will soon leave the cluster: preempted by the cloud, or drained by an operator
    or an autoscaler."""
    return draining_nodes()


def dead_process() -> str | None:
    """Return the name of a dead Ray process of this node; None if all live, or if this process did not start Ray."""
    return next(iter(dead_processes()), None)


def ray_log_folder() -> Path:
    return logs_folder()


@contextmanager
def request_nodes(bundles: Sequence[Mapping[str, float]]) -> Iterator[None]:
    """Ask the cluster's autoscaler, if there is one, to keep enough nodes for all `bundles` during the `with` block."""
    request_resources(bundles=[dict(bundle) for bundle in bundles])
    try:
        yield
    finally:
        if dead_process() is None:
            request_resources(bundles=[])


def nodes_except(departing_node_ids: Container[str]) -> list[dict[str, Any]]:
    """Return the nodes of `ray.nodes()` whose ids are not in `departing_node_ids`."""
    return [node for node in ray.nodes() if node["NodeID"] not in departing_node_ids]
