"""How this process joins a Ray cluster or starts a Ray of its own, and all uses of Ray's private names.

No other file uses a private name. Each name is looked up before it is used. If a later release of Ray lacks it, an
error says so.
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
from data_service.processes import RAY_SESSION_MARK, mark_ray_session, temporary_root

# Parts of Ray that one machine does not need.
UNUSED_PROCESS_STARTERS = ("start_api_server", "start_monitor", "start_log_monitor")
DRIVER_SYS_PATH_FIELD = "_py_driver_sys_path"
GLOBAL_NODE_ATTRIBUTE, DEAD_PROCESSES_METHOD, LOGS_FOLDER_METHOD = (
    "_global_node",
    "dead_processes",
    "get_logs_dir_path",
)
PRINT_FUNCTION = "print_to_stdstream"
DRAINING_FUNCTION = "get_draining_nodes"
_VITAL_PROCESSES = ("raylet", "gcs_server")
NICENESS_VARIABLE = "RAY_worker_niceness"


def start_ray(**local_settings: Any) -> None:
    """Join the cluster that RAY_ADDRESS names, or start a Ray on this machine with the settings `local_settings` of
    `ray.init`.

    What its processes print stays in Ray's log folder.

    Raises:
        EnvironmentUnusable: as `temporary_root` and `check_process_limits`, or TMPDIR is too long a name.
        LibraryChanged: this version of Ray has other private names than those that were tested.
    """
    folder = temporary_root()
    check_private_names()
    # Ray would print a dead raylet's log on standard output.
    setattr(worker, PRINT_FUNCTION, lambda *_, **__: None)
    # "local": without it Ray would join any cluster on the machine.
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
            f"TMPDIR={folder}: Ray's sockets there would have names of more than 107 bytes",
            remedy="set TMPDIR to a folder with a shorter name",
        ) from error


def is_cluster_configured() -> bool:
    return bool(os.environ.get("RAY_ADDRESS"))


@contextmanager
def _minimal_ray_process() -> Iterator[None]:
    """A Ray that is started in this context has only what we use, a token of its own, and a sign that we started it."""
    _set_auth_token()
    # Ray's control process would keep records of the last 100,000 calls for a dashboard.
    if not is_cluster_configured():
        os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
        # Niceness of workers, added to the command's: with Ray's default of 15 ranks starve if anything else runs.
        os.environ.setdefault(NICENESS_VARIABLE, "0")
    with without_unused_processes():
        yield
    if not is_cluster_configured():
        (logs_folder() / RAY_SESSION_MARK).touch()


def _set_auth_token() -> None:
    """Unless the user has a token for Ray's processes, or joins a cluster: this process and its children get one in
    their environment. Ray would write it to the home folder, which in a container may be read-only or not there."""
    given = is_cluster_configured() or {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"} & os.environ.keys()
    wanted = os.environ.get("RAY_AUTH_MODE", "token") == "token"
    if wanted and not given and not os.path.exists(os.path.expanduser("~/.ray/auth_token")):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


class _FrozenEmptyList(list[str]):
    """A list that stays empty when Ray adds folders for its workers to import from."""

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
    """Check all private names that can be looked up before Ray is started. Raises LibraryChanged: one is missing."""
    for name in (*UNUSED_PROCESS_STARTERS, DEAD_PROCESSES_METHOD, LOGS_FOLDER_METHOD):
        _get_private_attribute(Node, name)
    _get_private_attribute(JobConfig(), DRIVER_SYS_PATH_FIELD)
    _get_private_attribute(worker, GLOBAL_NODE_ATTRIBUTE)
    _get_private_attribute(worker, PRINT_FUNCTION)
    _get_private_attribute(state, DRAINING_FUNCTION)


def job_config_without_driver_path() -> JobConfig:
    """Return a job configuration for `ray.init` with which workers import only installed packages.

    By default they would first look into the driver's working directory, where a folder may have the name of one of our
    packages. Ray has no public setting for this.
    """
    job = JobConfig()
    _get_private_attribute(job, DRIVER_SYS_PATH_FIELD)
    setattr(job, DRIVER_SYS_PATH_FIELD, _FrozenEmptyList())
    return job


@contextmanager
def without_unused_processes() -> Iterator[None]:
    """Start Ray without dashboard, autoscaler and log monitor if it is started within the block.

    On one machine they are not needed, and each takes a second of a core to start. Ray has no public setting for this.
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
    """Return the ids of the nodes that are being drained, that is, will be removed. Ray has no public interface for
    it."""
    return frozenset(_get_private_attribute(state, DRAINING_FUNCTION)())


def dead_processes() -> list[str]:
    """Return the kinds of the vital processes of the Ray started here that have died.

    Ray itself notices only after about a minute, and until then every call to it hangs.
    """
    node = _get_private_attribute(worker, GLOBAL_NODE_ATTRIBUTE)
    dead = _get_private_attribute(node, DEAD_PROCESSES_METHOD)()
    return [str(kind) for kind, _ in dead if kind in _VITAL_PROCESSES]


def logs_folder() -> Path:
    """Return Ray's log folder on this node."""
    return Path(_get_private_attribute(_get_private_attribute(worker, GLOBAL_NODE_ATTRIBUTE), LOGS_FOLDER_METHOD)())
