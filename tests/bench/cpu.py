"""CPU time of a whole tree of processes."""

import psutil


def tree_seconds(without: frozenset[int] = frozenset()) -> float:
    """User and system seconds so far of this process and of all that descend from it and live.

    `without`: process ids left out, such as a server that stands for a machine elsewhere.
    """
    this = psutil.Process()
    return sum(
        _seconds(process) for process in (this, *this.children(recursive=True)) if process.pid not in without
    )


def _seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)
