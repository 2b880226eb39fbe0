"""Processes as the kernel tells them apart. No wall clock is read: that may be set while a run lives."""

import os
import socket
import time
from pathlib import Path

STARTED_HERE = "maskfleet-started-here"
"""A file in the log folder of a Ray that a command of ours has started: so its processes are known to be ours."""
_BOOT = Path("/proc/sys/kernel/random/boot_id")


def boot() -> str:
    """The kernel's name of this boot, the same in all containers of a machine. Empty where /proc has none."""
    return _BOOT.read_text().strip() if _BOOT.exists() else ""


def namespace() -> str:
    """The table in which this process's numbers are those of processes: its container's, or the machine's."""
    return os.readlink("/proc/self/ns/pid") if _BOOT.exists() else ""


def table() -> str:
    """Machine, boot and namespace: two processes with the same of it and the same number are one process, or one after
    the other."""
    return " ".join(part for part in (socket.gethostname(), boot(), namespace()) if part)


def since_boot() -> float:
    """Seconds since boot, suspension included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def started(pid: int) -> int:
    """When a process of this namespace began, in clock ticks since boot. 0 if there is none, or it has ended and waits
    to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])


def age_s(pid: int) -> float:
    """Seconds since a process of this namespace began."""
    return since_boot() - started(pid) / os.sysconf("SC_CLK_TCK")
