"""All uses of Ray's private names; no other file uses one.

Each name is looked up before it is used. If a later release of Ray lacks it, an error says so.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ray._private import worker
from ray._private.node import Node
from ray._private.state import state
from ray.job_config import JobConfig

from data_service.errors import library_changed

UNUSED = ("start_api_server", "start_monitor", "start_log_monitor")  # not needed by a Ray on one machine
FOLDERS = "_py_driver_sys_path"
NODE, DEAD, LOGS = "_global_node", "dead_processes", "get_logs_dir_path"
DRAINING = "get_draining_nodes"


class _Unchanged(list[str]):
    """A list that stays empty when Ray adds folders for its workers to import from."""

    def extend(self, folders: object) -> None:
        pass


def _name_of(owner: Any, name: str) -> Any:
    """Return the attribute `name` of `owner`. Raises LibraryChanged: it does not exist."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        of = owner.__name__ if isinstance(owner, type) else type(owner).__name__
        raise library_changed("ray", f"{of}.{name}") from error


def ensure_names() -> None:
    """Check all private names that can be looked up before Ray is started. Raises LibraryChanged: one is missing."""
    for name in (*UNUSED, DEAD, LOGS):
        _name_of(Node, name)
    _name_of(JobConfig(), FOLDERS)
    _name_of(worker, NODE)
    _name_of(state, DRAINING)


def installed_only() -> JobConfig:
    """Return a job configuration for `ray.init` with which workers import only installed packages.

    By default they would first look into the driver's working directory, where a folder may have the name of one of our
    packages. Ray has no public setting for this.
    """
    job = JobConfig()
    _name_of(job, FOLDERS)
    setattr(job, FOLDERS, _Unchanged())
    return job


@contextmanager
def without_unused() -> Iterator[None]:
    """Start Ray without dashboard, autoscaler and log monitor if it is started within the block.

    On one machine they are not needed, and each takes a second of a core to start. Ray has no public setting for this.
    """
    ensure_names()
    before = {name: _name_of(Node, name) for name in UNUSED}
    for name in UNUSED:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(Node, name, method)


def draining_nodes() -> frozenset[str]:
    """Return the ids of the nodes that are being drained, that is, will be removed. Ray has no public interface for
    it."""
    return frozenset(_name_of(state, DRAINING)())


def dead_processes() -> list[str]:
    """Return the kinds of those processes of the Ray started here that have died."""
    return [str(kind) for kind, _ in _name_of(_name_of(worker, NODE), DEAD)()]


def logs_folder() -> Path:
    """Return Ray's log folder on this node."""
    return Path(_name_of(_name_of(worker, NODE), LOGS)())
