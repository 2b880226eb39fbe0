"""Connects a start of a run to Ray: to the cluster in RAY_ADDRESS, or to a new local Ray on this machine."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import ray

from data_service.service.ray_internals import is_cluster_configured
from launcher.command import redirect_output
from launcher.errors import RunError, TransientRunError
from launcher.exit_codes import JOIN_SECONDS
from launcher.runtime.cluster.nodes import connect_ray, ray_log_folder
from launcher.runtime.cluster.resources import LocalRayResources
from launcher.runtime.cluster.stop_requests import StopRequests
from launcher.runtime.preflight.network import connection_error

NoteFunction = Callable[[str], None]
"""Function that shows a line to the operator."""

_CONNECT_S = 60.0  # time limit for the head node of the cluster to answer
_CONNECTION_TIMEOUT_S = 2.0  # time limit of one attempt to connect
_SHUTDOWN_TIMEOUT_S = 5.0  # time limit for Ray to disconnect


def wait_for_cluster(stopping: StopRequests, note: NoteFunction) -> None:
    """Wait until a server answers at RAY_ADDRESS. Ray itself would try for many minutes without a useful message.

    Raises TransientRunError if none answers: the address may be wrong, or the head node may not have started yet.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    deadline, announced = time.monotonic() + _CONNECT_S, False
    while not stopping.asked.is_set():
        refused = connection_error(address, _CONNECTION_TIMEOUT_S)
        if refused is None:
            return
        if time.monotonic() > deadline:
            raise TransientRunError(
                f"no Ray cluster answers at RAY_ADDRESS={address}: {refused}",
                remedy="check the address and that the cluster's head is up; unset RAY_ADDRESS to train on this "
                "machine alone",
            ) from refused
        if not announced:
            announced = True
            note(f"nothing answers at RAY_ADDRESS={address} yet: trying for {_CONNECT_S:.0f} s")
        stopping.asked.wait(0.5)


@contextmanager
def connected_ray(resources: LocalRayResources, stopping: StopRequests) -> Iterator[None]:
    """Connect to the cluster in RAY_ADDRESS, or start a local Ray, during the `with` block.

    The output of ranks stays in Ray's log folder. They tell the driver what the operator should know.
    """
    local = {} if is_cluster_configured() else _local_ray_settings(resources)
    try:
        connect_ray(**local)
    except ValueError as error:  # from Ray, if its object store would take all memory
        if not local:
            raise
        raise resources.too_large_error(str(error)) from error
    stopping.install_handlers()
    with redirect_output(ray_log_folder() / f"maskfleet-{os.getpid()}.log"):
        try:
            yield
        finally:
            goodbye = threading.Thread(target=ray.shutdown, name="goodbye", daemon=True)
            goodbye.start()
            goodbye.join(_SHUTDOWN_TIMEOUT_S)


def wait_for_nodes(node_count: int, stopping: StopRequests, note: NoteFunction) -> None:
    """Wait until the cluster has `node_count` nodes, or a stop is requested. Raises TransientRunError, which names the
    nodes that joined, if nodes are missing after MASKFLEET_JOIN_SECONDS."""
    seconds = float(os.environ.get("MASKFLEET_JOIN_SECONDS", JOIN_SECONDS))  # infra/ray_node.sh reads it too
    deadline, announced = time.monotonic() + seconds, False
    while len(there := sorted(node["NodeName"] for node in ray.nodes() if node["Alive"])) < node_count:
        if not announced:
            note(f"waiting for nodes: {len(there)} of {node_count} have joined")
            announced = True
        if time.monotonic() > deadline:
            raise TransientRunError(
                f"only {len(there)} of {node_count} nodes joined the Ray cluster in {seconds:g} s: {', '.join(there)}",
                remedy="see the logs of the missing nodes, or start with fewer nodes (--nodes) to train without them",
            )
        if stopping.asked.wait(0.5):
            return


def _local_ray_settings(resources: LocalRayResources) -> dict[str, Any]:
    return {
        **_metrics_port_setting(),
        "num_cpus": resources.local_cpus,
        "object_store_memory": resources.object_store_bytes,
    }


def _metrics_port_setting() -> dict[str, int]:
    """Return Ray's option for the port at which it exports metrics to Prometheus: MASKFLEET_METRICS_PORT. If that is
    not set, Ray takes a free port. Raises RunError if it is not a port number."""
    given = os.environ.get("MASKFLEET_METRICS_PORT", "")
    if given and not (given.isdecimal() and 0 < int(given) < 65536):
        raise RunError(
            f"MASKFLEET_METRICS_PORT is {given!r}, which is not a port",
            remedy="set it to a number from 1 to 65535, or unset it",
        )
    return {"_metrics_export_port": int(given)} if given else {}
