"""A command as somebody sees it who waits: on a terminal or in a log, with the times at which something appears."""

import os
import pty
import resource
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import wait
from pathlib import Path


@dataclass(frozen=True)
class SeenCommand:
    """A command that has ended. Seconds are from its start.

    Attributes:
        text: what it wrote to standard output and error.
        times: when each piece of it came.
        seconds: to its end.
        cpu: seconds of a processor that it took; nearly the same on a quiet machine, and still true on a busy one.
    """

    code: int
    text: str
    times: tuple[float, ...]
    seconds: float
    cpu: float

    @property
    def silence(self) -> float:
        """The longest time without a sign of life."""
        return max(later - earlier for earlier, later in pairwise((0.0, *self.times, self.seconds)))


def seen(
    command: list[str],
    *,
    terminal: bool = False,
    timeout: float = 900,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
) -> SeenCommand:
    """Runs `command` with its output on a terminal, or into a pipe."""
    reading, writing = pty.openpty() if terminal else os.pipe()
    began, used = time.monotonic(), _cpu_of_children()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=writing,
        stderr=writing,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    )
    os.close(writing)
    pieces, times = [], []
    while piece := _next(reading, began + timeout):
        pieces.append(piece)
        times.append(time.monotonic() - began)
    os.close(reading)
    if time.monotonic() - began >= timeout:
        process.kill()
    code = process.wait()
    text = b"".join(pieces).decode("utf-8", "replace")
    return SeenCommand(code, text, tuple(times), time.monotonic() - began, _cpu_of_children() - used)


def _cpu_of_children() -> float:
    """Of those that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _next(reading: int, deadline: float) -> bytes:
    """Empty at the end, or after the `deadline`."""
    if not wait([reading], max(0.0, deadline - time.monotonic())):
        return b""
    try:
        return os.read(reading, 1 << 16)
    except OSError:  # of a terminal whose last writer has gone
        return b""


def without_signs_of_life(text: str) -> str:
    """What a command printed to no terminal, but for the lines that come after three seconds of a busy machine."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.rstrip().endswith((" so far", " left")))
