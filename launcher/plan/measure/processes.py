"""Runs ranks as processes of this machine: starts them together, waits for all, and ends all.

When a rank dies, the others wait for it: on gloo until they notice, on NCCL until the collective times out. So the
first process that fails is noticed at once, and the others are killed.
"""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import PEER_GONE, EstimateError

_TIMEOUT_S = 1800.0  # for all ranks to end
_POLL_S = 0.1
_OTHERS_S = 2.0  # for the others to say why they end, once one has
_SMALLER = "measure a smaller form: --tiny, or fewer model.layers"
_SAID = 500  # characters of what a rank that failed said
# The last line of a traceback, as torch prints it on a rank, too. What a message of ours has below it is its remedy.
_ERROR = re.compile(r"(?:\[rank\d+\]: )?(?:\w+\.)*((?!remedy)\w+: .*)")


@dataclass(frozen=True)
class RankCommand:
    """How one rank is started.

    Attributes:
        words: the command and its arguments.
        environment: variables added to those of this process.
        log: file that receives all output.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    log: Path


@dataclass(frozen=True)
class _Failed:
    """A rank that ended with a code other than 0. A negative code is the signal that killed it."""

    rank: int
    code: int
    error: str

    @property
    def is_consequence(self) -> bool:
        """Whether its error only says that another rank is gone."""
        return self.code > 0 and any(sign in self.error for sign in PEER_GONE)


def run_ranks(commands: Sequence[RankCommand], timeout_s: float = _TIMEOUT_S) -> None:
    """Start all ranks and wait until each has ended with code 0. On return, and on any error, none of their processes
    is left.

    Raises:
        EstimateError: a rank failed (the message names it and its error), or the ranks took longer than `timeout_s`.
    """
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            processes.append(_start(command))
        failed = _first_failures(processes, commands, time.monotonic() + timeout_s)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if failed is None:
        raise EstimateError(
            f"the measured steps did not finish within {timeout_s / 60:.3g} minutes", remedy=_SMALLER
        )
    if failed:
        raise _error(_cause(failed), len(commands))


def _start(command: RankCommand) -> "subprocess.Popen[bytes]":
    with command.log.open("wb") as output:
        return subprocess.Popen(
            command.words,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | command.environment,
        )


def _first_failures(
    processes: Sequence["subprocess.Popen[bytes]"], commands: Sequence[RankCommand], deadline: float
) -> list[_Failed] | None:
    """Return the ranks that failed, in the order in which they ended: the first, and those within `_OTHERS_S` after it.

    Empty if all succeeded; None if the deadline passed.
    """
    running = dict(enumerate(processes))
    failed: list[_Failed] = []
    while running:
        for rank, process in list(running.items()):
            code = process.poll()
            if code is not None:
                del running[rank]
            if code:
                deadline = min(deadline, time.monotonic() + _OTHERS_S)
                failed.append(_Failed(rank, code, _last_error(commands[rank].log, code)))
        if running and time.monotonic() > deadline:
            return failed or None
        if running:
            time.sleep(_POLL_S)
    return failed


def _cause(failed: Sequence[_Failed]) -> _Failed:
    """Return the failure that explains the others: a rank that was killed, else the first error that is not a
    consequence.
    """
    killed = [one for one in failed if one.code < 0]
    own = [one for one in failed if not one.is_consequence]
    return next(iter([*killed, *own, *failed]))


def _last_error(log: Path, code: int) -> str:
    lines = log.read_text("utf-8", errors="replace").strip().splitlines() or [f"code {code}"]
    found = (match for line in reversed(lines) if (match := _ERROR.match(line)))
    return next((match[1] for match in found), lines[-1])


def _error(failed: _Failed, world: int) -> EstimateError:
    who = f"rank {failed.rank} of {world}"
    if failed.code > 0:
        return EstimateError(f"{who} failed: {failed.error[:_SAID]}", remedy=_SMALLER)
    why = ": the machine ran out of memory, most likely" if -failed.code == signal.SIGKILL else ""
    return EstimateError(f"{who} was killed by signal {-failed.code}{why}", remedy=_SMALLER)
