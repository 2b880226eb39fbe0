"""Every private name of Ray's that we use; only this file uses any.

Each is looked for before it is used: another name in a later release is an error that says so, not another Ray.
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

UNUSED = ("start_api_server", "start_monitor", "start_log_monitor")  # of a Ray on one machine
FOLDERS = "_py_driver_sys_path"
NODE, DEAD, LOGS = "_global_node", "dead_processes", "get_logs_dir_path"
DRAINING = "get_draining_nodes"


class _Unchanged(list[str]):
    """Folders that Ray adds for its workers to import from. None is kept."""

    def extend(self, folders: object) -> None:
        pass


def _name_of(owner: Any, name: str) -> Any:
    """The attribute `name`. Raises LibraryChanged: there is none."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        of = owner.__name__ if isinstance(owner, type) else type(owner).__name__
        raise library_changed("ray", f"{of}.{name}") from error


def ensure_names() -> None:
    """All that can be looked for before a Ray is started. Raises LibraryChanged: something has another name."""
    for name in (*UNUSED, DEAD, LOGS):
        _name_of(Node, name)
    _name_of(JobConfig(), FOLDERS)
    _name_of(worker, NODE)
    _name_of(state, DRAINING)


def installed_only() -> JobConfig:
    """For `ray.init`: workers import only what is installed. By default they would look into the driver's working
    directory first, where a folder may have the name of one of our packages. Ray has no public setting for this.
    """
    job = JobConfig()
    _name_of(job, FOLDERS)
    setattr(job, FOLDERS, _Unchanged())
    return job


@contextmanager
def without_unused() -> Iterator[None]:
    """A Ray that is started in this context comes without dashboard, autoscaler and log monitor. On one machine nobody
    uses them, and each takes a second of a core to start. Ray has no public setting for this.
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
    """Ids of the nodes that will be taken away. Ray has no public interface that tells this."""
    return frozenset(_name_of(state, DRAINING)())


def dead_processes() -> list[str]:
    """Kinds of those processes that have died, of the Ray that was started here."""
    return [str(kind) for kind, _ in _name_of(_name_of(worker, NODE), DEAD)()]


def logs_folder() -> Path:
    """Ray's log folder on this node."""
    return Path(_name_of(_name_of(worker, NODE), LOGS)())
