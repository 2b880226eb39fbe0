"""`maskfleet train` as a process of its own, watched from outside through the run's store and the process table."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil

from checkpoints.listing import list_committed as commits
from data_service.store.open import open_store
from launcher.runtime.run.history import read_history
from tests.support.runs.observer import kill_quietly, title


@contextmanager
def training(
    uri: str,
    *options: str,
    prefix: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator["subprocess.Popen[str]"]:
    """`maskfleet train` in a process group of its own; whatever is left of it is killed at the end.

    `prefix`: the command that runs it elsewhere; `environment`: beside this process's own.
    """
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | dict(environment or {})
    process = subprocess.Popen(
        [*prefix, str(Path(sys.executable).with_name("maskfleet")), "train", uri, *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill_everything(process)


def output(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.read()


def committed(uri: str) -> int:
    """Step of the newest checkpoint, 0 if there is none."""
    return max((mark.step for mark in commits(open_store(uri))), default=0)


def done(uri: str) -> int:
    """Steps on record."""
    return len(read_history(open_store(uri)).steps)


def wait_for(process: "subprocess.Popen[str]", condition: Callable[[], bool], timeout: float = 240) -> None:
    """Until `condition` holds; fails at once if the command ends before that."""
    tick, deadline = threading.Event(), time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, output(process)
        assert time.monotonic() < deadline
        tick.wait(0.05)


def await_commit(process: "subprocess.Popen[str]", uri: str) -> None:
    """Until there is a checkpoint that is newer than any so far."""
    before = committed(uri)
    wait_for(process, lambda: committed(uri) > before)


def spare_waits(process: "subprocess.Popen[str]", loading: set[int]) -> bool:
    """Whether a spare process waits that was seen to load. `loading`: those seen so far; new ones are added."""
    return spares_waiting(process, loading) > 0


def spares_waiting(process: "subprocess.Popen[str]", loading: set[int]) -> int:
    """How many spare processes wait that were seen to load. `loading`: as in `spare_waits`."""
    loading |= {one.pid for one in titled(process, "ray::RankProcess.load")}
    idle = {one.pid for one in titled(process, "ray::RankProcess") if title(one).split() == ["ray::RankProcess"]}
    return len(idle & loading)


def kill(process: "subprocess.Popen[str]", name: str, *, optional: bool = False) -> None:
    """SIGKILL to one descendant whose title begins with `name`."""
    found = titled(process, name)
    assert found or optional, sorted(title(child) for child in descendants(process))
    for child in found[:1]:
        child.kill()


def freeze(process: "subprocess.Popen[str]", name: str) -> None:
    """SIGSTOP to one descendant whose title begins with `name`."""
    titled(process, name)[0].suspend()


def kill_everything(process: "subprocess.Popen[str]") -> None:
    for child in descendants(process):
        kill_quietly(child)
    process.kill()
    process.wait()


def descendants(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def titled(process: "subprocess.Popen[str]", name: str) -> list[psutil.Process]:
    """The descendants whose title begins with `name`."""
    return [child for child in descendants(process) if title(child).startswith(name)]
