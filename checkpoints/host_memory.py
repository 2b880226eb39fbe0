"""The memory that is still available to processes here: the machine's, or less if control groups limit it.

Containers, jobs of Slurm and services of systemd are control groups (cgroups), of version 1 or 2. Each of them may have
a limit, and so may the groups above it. The kernel kills a process that would exceed a limit. File cache is not counted
as used, because the kernel gives it up first. Source: "Memory Resource Controller" and "Control Group v2" of the Linux
kernel's documentation.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True)
class _CgroupFiles:
    """The files in which a control group reports its memory.

    Attributes:
        controller: name of the hierarchy in /proc/self/cgroup.
        limit, used: files that hold the limit and the memory in use, in bytes.
        cached: names of the lines in memory.stat that count file cache.
    """

    controller: str
    limit: str
    used: str
    cached: tuple[str, str]


_CGROUP_V1 = _CgroupFiles(
    "memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_active_file", "total_inactive_file"),
)
_CGROUP_V2 = _CgroupFiles("", "memory.max", "memory.current", ("active_file", "inactive_file"))


def available_memory(proc_folder: Path = Path("/proc/self")) -> tuple[int, int]:
    """Return the bytes of memory that are still available to a process, and the total: the machine's, or what its
    control groups allow if that is less. `proc_folder`: the process's folder in /proc."""
    machine = psutil.virtual_memory()
    available, total = int(machine.available), int(machine.total)
    for limit, left in _cgroup_limits(proc_folder):
        available, total = min(available, left), min(total, limit)
    return max(0, available), total


def _cgroup_limits(proc_folder: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of each control group that has one, and how much of it is left, in bytes."""
    for folder, files in _cgroup_folders(proc_folder):
        limit, used = _read_number(folder / files.limit), _read_number(folder / files.used)
        if limit is not None and used is not None:
            yield limit, limit - used + _page_cache_bytes(folder, files)


def _cgroup_folders(proc_folder: Path) -> Iterator[tuple[Path, _CgroupFiles]]:
    """Yield the folders of the process's control groups and of their parents. A container may see its own group as
    the root, under a path that does not exist there. Yields nothing if /proc does not list the groups."""
    try:
        cgroups, mounts = (proc_folder / "cgroup").read_text(), (proc_folder / "mounts").read_text()
    except OSError:
        return
    paths = dict(line.split(":", 2)[1:] for line in cgroups.splitlines())
    for line in mounts.splitlines():
        _, point, kind, options, *_ = line.split()
        files = {"cgroup": _CGROUP_V1, "cgroup2": _CGROUP_V2}.get(kind)
        if files is None or (files is _CGROUP_V1 and "memory" not in options.split(",")):
            continue
        own = next((path for names, path in paths.items() if files.controller in names.split(",")), "/")
        root = Path(point)
        folder = root / own.lstrip("/")
        yield from ((each, files) for each in (folder, *folder.parents) if each.is_relative_to(root))


def _read_number(path: Path) -> int | None:
    """Return the number in a file; None if there is none, or it says that there is no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _page_cache_bytes(folder: Path, files: _CgroupFiles) -> int:
    try:
        lines = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    return sum(int(lines.get(name, 0)) for name in files.cached)
