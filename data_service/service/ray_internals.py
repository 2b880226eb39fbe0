"""Joins a Ray cluster or starts Ray on this machine, and holds all uses of Ray's private names.

Each private name is looked up before it is used. If another release of Ray lacks the name, LibraryChanged says so.
"""

import logging
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import worker
from ray._private.node import Node
from ray._private.state import state
from ray.job_config import JobConfig

from data_service.errors import EnvironmentUnusable, library_changed
from data_service.limits import check_process_limits
from data_service.processes import mark_ray_session, temporary_root

# Methods of Node that start the dashboard, autoscaler and log monitor, which one machine does not need.
UNUSED_PROCESS_STARTERS = ("start_api_server", "start_monitor", "start_log_monitor")
DRIVER_SYS_PATH_FIELD = "_py_driver_sys_path"  # field of JobConfig: folders from which workers import
# A variable of `worker`, and two methods of the Node in it.
GLOBAL_NODE_ATTRIBUTE, DEAD_PROCESSES_METHOD, LOGS_FOLDER_METHOD = "_global_node", "dead_processes", "get_logs_dir_path"
PRINT_FUNCTION = "print_to_stdstream"  # function of `worker` that prints the logs of Ray's processes
DRAINING_FUNCTION = "get_draining_nodes"  # method of `state`
_VITAL_PROCESSES = ("raylet", "gcs_server")  # kinds of processes without which Ray hangs
NICENESS_VARIABLE = "RAY_worker_niceness"  # environment variable: what workers add to the niceness of the command


def start_ray(**local_settings: Any) -> None:
    """Join the cluster at RAY_ADDRESS, or start Ray on this machine with `local_settings` as arguments of `ray.init`.

    The output of Ray's processes goes to Ray's log folder only.

    Raises:
        EnvironmentUnusable: as `temporary_root` and `check_process_limits`, or the path in TMPDIR is too long.
        LibraryChanged: this version of Ray lacks a private name that is used here.
    """
    folder = temporary_root()
    check_private_names()
    # Ray would print the log of a dead raylet on standard output.
    setattr(worker, PRINT_FUNCTION, lambda *_, **__: None)
    # Without "local" Ray would join any cluster that runs on this machine.
    own = local_settings | {"address": "local", "include_dashboard": False}
    if not is_cluster_configured():
        check_process_limits(local_settings.get("object_store_memory", 0))
        mark_ray_session()
    try:
        with _minimal_ray_process():
            ray.init(
                logging_level=logging.ERROR,
                log_to_driver=False,
                job_config=job_config_without_driver_path(),
                **({} if is_cluster_configured() else own),
            )
    except OSError as error:
        if "AF_UNIX" not in str(error):
            raise
        raise EnvironmentUnusable(
            f"TMPDIR={folder} is too long: the paths of Ray's sockets in it would exceed 107 bytes",
            remedy="set TMPDIR to a folder with a shorter path",
        ) from error


def is_cluster_configured() -> bool:
    return bool(os.environ.get("RAY_ADDRESS"))


@contextmanager
def _minimal_ray_process() -> Iterator[None]:
    """Within the block Ray starts without unused processes and with an access token."""
    _set_auth_token()
    # Ray's control process would keep records of the last 100,000 calls for the unused dashboard.
    if not is_cluster_configured():
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        # With Ray's default niceness of 15 for workers, ranks starve if anything else runs.
        os.environ.setdefault(NICENESS_VARIABLE, "0")
        # Ray would wait for a worker on each core, and for ever if one of them dies (ray-project/ray#40131).
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    with without_unused_processes():
        yield


def _set_auth_token() -> None:
    """Set a random token for Ray's processes in the environment, unless the user gives one or joins a cluster. Ray
    itself would store its token in the home folder, which in a container may be read-only or missing."""
    given = is_cluster_configured() or {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    wanted = os.environ.get("RAY_AUTH_MODE", "token") == "token"
    if wanted and not given and not os.path.exists(os.path.expanduser("~/.ray/auth_token")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


class _FrozenEmptyList(list[str]):
    """A list that stays empty when Ray extends it by the folders from which workers import."""

    def extend(self, folders: object) -> None:
        pass


def _get_private_attribute(owner: Any, name: str) -> Any:
    """Return the attribute `name` of `owner`. Raises LibraryChanged: it does not exist."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        of = owner.__name__ if isinstance(owner, type) else type(owner).__name__
        raise library_changed("ray", f"{of}.{name}") from error


def check_private_names() -> None:
    """Check before Ray's start that its private names exist. Raises LibraryChanged: one is missing."""
    for name in (*UNUSED_PROCESS_STARTERS, DEAD_PROCESSES_METHOD, LOGS_FOLDER_METHOD):
        _get_private_attribute(Node, name)
    _get_private_attribute(JobConfig(), DRIVER_SYS_PATH_FIELD)
    _get_private_attribute(worker, GLOBAL_NODE_ATTRIBUTE)
    _get_private_attribute(worker, PRINT_FUNCTION)
    _get_private_attribute(state, DRAINING_FUNCTION)


def job_config_without_driver_path() -> JobConfig:
    """Return a job configuration for `ray.init` by which workers import only installed packages.

    By default workers would also import from the driver's working directory, where a folder may have the name of one of
    our packages. Ray has no public setting for this.
    """
    job = JobConfig()
    _get_private_attribute(job, DRIVER_SYS_PATH_FIELD)
    setattr(job, DRIVER_SYS_PATH_FIELD, _FrozenEmptyList())
    return job


@contextmanager
def without_unused_processes() -> Iterator[None]:
    """Within the block Ray starts without dashboard, autoscaler and log monitor.

    One machine does not need them, and each takes a second of CPU time to start. Ray has no public setting for this.
    """
    before = {name: _get_private_attribute(Node, name) for name in UNUSED_PROCESS_STARTERS}
    for name in UNUSED_PROCESS_STARTERS:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


def draining_nodes() -> frozenset[str]:
    """Return the ids of the draining nodes, which will soon be removed. Ray has no public function for this."""
    return frozenset(_get_private_attribute(state, DRAINING_FUNCTION)())


def dead_processes() -> list[str]:
    """Return the kinds of vital Ray processes (`_VITAL_PROCESSES`) that this process started and that have died.

    Ray itself notices a death only after about a minute; until then every call to Ray hangs.
    """
    node = _get_private_attribute(worker, GLOBAL_NODE_ATTRIBUTE)
    dead = _get_private_attribute(node, DEAD_PROCESSES_METHOD)()
    return [str(kind) for kind, _ in dead if kind in _VITAL_PROCESSES]


def logs_folder() -> Path:
    """Return Ray's log folder on this node."""
    return Path(_get_private_attribute(_get_private_attribute(worker, GLOBAL_NODE_ATTRIBUTE), LOGS_FOLDER_METHOD)())
