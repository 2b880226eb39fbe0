"""A control group with a limit of memory, for processes of a test. Only root can make one."""

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


@contextmanager
def limited_group(limit: int) -> Iterator[Path]:
    """Yield the folder of a new group whose processes get `limit` bytes together. Skips the test where none can be
    made."""
    group = (_V1 if _V1.is_dir() else _V2) / f"maskfleet-{uuid.uuid4().hex[:8]}"
    try:
        group.mkdir()
        (group / ("memory.limit_in_bytes" if _V1.is_dir() else "memory.max")).write_text(str(limit))
    except OSError as error:
        with suppress(OSError):
            group.rmdir()
        pytest.skip(f"no control group can be made: {error}")
    try:
        yield group
    finally:
        for pid in map(int, (group / "cgroup.procs").read_text().split()):
            with suppress(psutil.NoSuchProcess):
                left = psutil.Process(pid)
                left.kill()
                left.wait(10)
        group.rmdir()


def peak(group: Path) -> int:
    """Return the most bytes that the group's processes had at a time, file cache included."""
    return int((group / ("memory.max_usage_in_bytes" if _V1.is_dir() else "memory.peak")).read_text())


def run_in(group: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python program in a group to its end."""

    def enter() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))

    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, preexec_fn=enter, capture_output=True, text=True, timeout=60)
