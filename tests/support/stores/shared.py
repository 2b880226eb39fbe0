"""One server for all processes of a test run, of programs that take seconds to start."""

import fcntl
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

Start = Callable[[Path], tuple[dict[str, str], list[int]]]
"""Starts a server in a new folder; returns what its users need, and its processes in the order in which to end them."""


@contextmanager
def shared(folder: Path, name: str, start: Start) -> Iterator[dict[str, str]]:
    """What `start` returned, for all processes that share `folder`. Who comes first starts the server, who leaves last
    stops it."""
    said = folder / f"{name}.json"
    with (folder / f"{name}.users").open("a") as users:
        with _locked(folder / f"{name}.lock"):
            if not said.exists():
                place = tempfile.mkdtemp(prefix=f"{name}-")  # sockets' paths must be short
                server, daemons = start(Path(place))
                said.write_text(json.dumps([place, server, daemons]))
            fcntl.flock(users, fcntl.LOCK_SH)
        place, server, daemons = json.loads(said.read_text())
        try:
            yield server
        finally:
            with _locked(folder / f"{name}.lock"):
                fcntl.flock(users, fcntl.LOCK_UN)
                with suppress(BlockingIOError):
                    fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)  # raises if another one still uses it
                    stop(daemons)
                    said.unlink()
                    shutil.rmtree(place)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def stop(daemons: list[int]) -> None:
    """End the daemons, whose parent may have ended before. What they hold is in memory, so nothing is lost."""
    for process in daemons:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def wait(ready: Callable[[], bool], process: "subprocess.Popen[bytes]", what: str, *, seconds: float) -> None:
    """Until a server is ready. Raises RuntimeError: its process has ended; TimeoutError."""
    deadline = time.monotonic() + seconds
    while not ready():
        if process.poll() is not None:
            raise RuntimeError(f"{what} ended with status {process.returncode} instead of starting")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} was not ready after {seconds:.0f} s")
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def answers(port: int) -> bool:
    """Whether a server on this host answers HTTP, with whatever status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/")
        connection.getresponse().read()
    except OSError:
        return False
    finally:
        connection.close()
    return True
