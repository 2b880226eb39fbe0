"""A run seen from outside: its processes, what each is, what is left of them; and how far it is, by its store.

A command is marked by an environment variable, which its children inherit. Some of Ray's overwrite their environment
with a title; those are known by their session or by a parent. A process once seen stays known, wherever it moves.
"""

import os
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from checkpoints.layout import CheckpointName
from checkpoints.listing import list_folders
from data_service.errors import UserError
from data_service.store.open import open_store
from launcher.runtime.run.history import read_history

MARK = "MASKFLEET_TEST_COMMAND"
COMMAND = "command"
KINDS = {
    "driver": "/maskfleet train ",
    "rank": "ray::RankProcess as rank",
    "spare process": "ray::RankProcess",
    "keeper": "ray::MemoryKeeper",
    "feed": "ray::Feed",
    "data worker": "ray::_build_slabs",
    "idle worker": "ray::IDLE",
    "dashboard agent": "ray::DashboardAgent",
    "runtime env agent": "ray::RuntimeEnvAgent",
    "raylet": "/raylet/raylet ",
    "gcs": "/gcs_server ",
    "worker that starts": "/workers/default_worker.py",
}
"""Name -> what its command line holds. The command itself, whose line the driver shares, is told by its pid."""


@dataclass
class Processes:
    """Those of the commands marked with `mark`.

    Attributes:
        commands: process id of each command so far, which leads its session.
    """

    mark: str
    commands: list[int] = field(default_factory=list)
    _known: dict[tuple[int, float], str] = field(default_factory=dict)

    def alive(self) -> list[psutil.Process]:
        """In order of kind, then of their start. Zombies are not: their parents have yet to look."""
        there = list(psutil.process_iter())
        self._forget_reused({one.pid: _key(one) for one in there})
        found = [one for one in there if self._is_ours(one)]
        alive = [one for one in found if _status(one) not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD, "")]
        return sorted(alive, key=lambda one: (self.kind(one), *_key(one)[::-1]))

    def kind(self, process: psutil.Process) -> str:
        """What it is, as it was when it was last seen with a command line of its own."""
        if process.pid in self.commands:
            return COMMAND
        line = title(process)
        name = next((kind for kind, part in KINDS.items() if part in line), f"other: {line[:80]}")
        return name if line else self._known.get(_key(process), "other")

    def await_end(self, seconds: float) -> list[str]:
        """What is still there after so long, as lines of text; nothing if all have ended."""
        tick, deadline = threading.Event(), time.monotonic() + seconds
        while (left := self.alive()) and time.monotonic() < deadline:
            tick.wait(0.2)
        return [self.describe(one) for one in left]

    def describe(self, process: psutil.Process) -> str:
        try:
            parent, command = process.ppid(), self._command(process)
            since = time.time() - process.create_time()
        except psutil.Error:
            return f"{process.pid} gone"
        return f"{process.pid} < {parent}, {self.kind(process)}, of command {command}, {since:.0f} s old"

    def tree(self) -> str:
        return "\n".join(self.describe(one) for one in self.alive())

    def kill(self) -> None:
        """All, until none is left."""
        tick = threading.Event()
        while left := self.alive():
            for one in left:
                kill_quietly(one)
            tick.wait(0.1)

    def _forget_reused(self, there: dict[int, tuple[int, float]]) -> None:
        """Numbers of dead processes that others have now: numbers begin anew after some thousands of processes."""
        self._known = {key: kind for key, kind in self._known.items() if there.get(key[0], key) == key}

    def _is_ours(self, process: psutil.Process) -> bool:
        if process.pid == os.getpid():
            return False
        try:
            ours = (
                _key(process) in self._known
                or os.getsid(process.pid) in {pid for pid, _ in self._known}
                or self.mark in _environment(process.pid)
                or process.ppid() in {pid for pid, _ in self._known}
            )
        except (psutil.Error, OSError):
            return False
        if ours:  # also one that is between two programs, and has no title at this moment
            self._known[_key(process)] = self.kind(process)
        return ours

    def _command(self, process: psutil.Process) -> str:
        """Number of the command, from 1."""
        try:
            session = os.getsid(process.pid)
        except OSError:
            return "?"
        return str(self.commands.index(session) + 1) if session in self.commands else "?"


@dataclass(frozen=True)
class Seen:
    """How far a run is.

    Attributes:
        newest: the newest segment of its metrics, which changes when steps are made.
        done, evaluated: the newest step that is done, or evaluated after, by its records.
        evaluates: whether its ranks ought to be evaluating.
        committed: step of the newest checkpoint.
        unfinished: checkpoints without a manifest.
    """

    newest: str
    done: int
    evaluates: bool
    committed: int
    unfinished: frozenset[CheckpointName]


class StoreView:
    """Looks at the store of the run at `uri`, which evaluates after every `every` steps."""

    def __init__(self, uri: str, every: int) -> None:
        self._store, self._every = open_store(uri), every

    def look(self) -> Seen:
        """Retention deletes while one looks: then once more."""
        while True:
            try:
                return self._look()
            except UserError:
                time.sleep(0.01)

    def _look(self) -> Seen:
        newest = max((entry.key for entry in self._store.list("metrics/")), default="")
        history = read_history(self._store, 3)
        done = int(history.steps.numbers[-1]) + 1 if len(history.steps) else 0
        evaluated = history.evaluations[-1]["step"] if history.evaluations else 0
        found = list_folders(self._store)
        return Seen(
            newest=newest,
            done=done,
            evaluates=done > evaluated and done % self._every == 0,
            committed=max((folder.name.step for folder in found if folder.is_committed), default=0),
            unfinished=frozenset(folder.name for folder in found if not folder.is_committed),
        )


def title(process: psutil.Process) -> str:
    """The command line. Behind that of a rank's actor is its rank, by the name of the thread that trains."""
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return ""
    rank = _rank_of(process) if line.startswith("ray::RankProcess") else ""
    return f"ray::RankProcess{rank}" if rank else line


def _rank_of(process: psutil.Process) -> str:
    try:
        names = [path.read_text() for path in Path(f"/proc/{process.pid}/task").glob("*/comm")]
    except OSError:
        return ""
    return next((f" as {name.strip()}" for name in names if name.startswith("rank ")), "")


def _key(process: psutil.Process) -> tuple[int, float]:
    """Of this process only, though numbers are used again."""
    try:
        return process.pid, process.create_time()
    except psutil.Error:
        return process.pid, 0.0


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.Error:
        return ""


def _environment(pid: int) -> str:
    return Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")


def kill_quietly(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return


def listens(process: psutil.Process) -> bool:
    """Whether a command holds signals back, to take them one by one: a moment after its interpreter has started."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    blocked = next((int(line.split()[1], 16) for line in lines if line.startswith("SigBlk:")), 0)
    return bool(blocked >> (signal.SIGTERM - 1) & 1)
