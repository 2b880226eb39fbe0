"""Processes that may crash, hang or poison their CUDA context without harm to the one that started them."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_SET_PDEATHSIG = 1  # of prctl(2)
_SAID = 600  # characters of what a process printed last


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
        code: its exit code; negative: the signal that killed it. late: it was ended for taking too long.
        seconds: that it took. said: the end of what it printed.
    """

    code: int
    late: bool
    seconds: float
    said: str

    @property
    def how(self) -> str:
        """In words."""
        if self.late:
            return f"ended after {self.seconds:.0f} s"
        if self.code < 0:
            return f"killed by {signal.Signals(-self.code).name}"
        return f"exit code {self.code}"


def run_process(
    module: str, words: Sequence[str], environment: Mapping[str, str], log: Path, limit: float
) -> Ended:
    """Run `python -m module words` to its end, for `limit` seconds at most. It and all that it started are gone
    afterwards, also where this process is killed."""
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment, _PARENT: str(os.getpid())},
            start_new_session=True,
        )
    late = False
    try:
        process.wait(limit)
    except subprocess.TimeoutExpired:
        late = True
    finally:
        _kill_session(process)
    said = log.read_text("utf-8", errors="replace").strip()[-_SAID:]
    return Ended(process.returncode, late, time.monotonic() - began, said)


_PARENT = "MASKFLEET_BURNIN_PARENT"


def die_with_parent() -> None:
    """This process is killed when the one that started it ends."""
    ctypes.CDLL(None).prctl(_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.environ.get(_PARENT) != str(os.getppid()):  # it ended before that
        sys.exit(1)


def _kill_session(process: "subprocess.Popen[bytes]") -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
