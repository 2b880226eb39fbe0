"""`train` runs `maskfleet train` as a subprocess, for notebooks and scripts, and returns how it ended."""

import json
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Literal

from checkpoints.listing import list_committed
from data_service.store.open import open_store
from launcher.exit_codes import FINISHED, MISTAKE, STOPPED

EndKind = Literal["finished", "stopped", "mistake", "again"]
_END_BY_CODE: dict[int, EndKind] = {FINISHED: "finished", STOPPED: "stopped", MISTAKE: "mistake"}
_MAX_LINES = 200  # number of last output lines that `Ending.said` has


@dataclass(frozen=True)
class Ending:
    """How a start of a run ended.

    Attributes:
        code: exit code of the command (infra/docs/runbook.md).
        how: `finished`: training is complete. `stopped`: `maskfleet runs stop` was called. `mistake`: an input is
            wrong, or restarts did not cure a failure (see `said`). `again`: any other end; call `train` again to
            continue.
        step: number of steps done in the newest checkpoint.
        said: the last 200 lines that the command printed.
    """

    code: int
    how: EndKind
    step: int
    said: str


def train(
    uri: str,
    settings: Mapping[str, object] | None = None,
    *,
    accept_changes: bool = False,
    without_removed: bool = False,
    nodes: int = 1,
    show: bool = True,
) -> Ending:
    """Start or continue the run at `uri` with `maskfleet train` in a subprocess, and wait until it has ended. An
    interrupt (Ctrl-C, a notebook's stop button) is passed on: the run saves a checkpoint and ends.

    Args:
        uri: the run's folder or s3:// URI.
        settings: values by dotted key of the recipe, as with `--set`.
        accept_changes: whether `settings` may change the identity of an existing run. The change is recorded.
        without_removed: whether to continue without documents that were removed from a corpus since the last start.
        nodes: training waits until the Ray cluster in RAY_ADDRESS has this many nodes.
        show: whether to print the output of the command.

    Raises:
        StoreError: after the command has ended, the run's checkpoints cannot be listed.
    """
    command = [sys.executable, "-P", "-m", "maskfleet", "train", uri, "--nodes", str(nodes)]
    command += [part for key, value in (settings or {}).items() for part in ("--set", f"{key}={json.dumps(value)}")]
    command += ["--accept-changes"] if accept_changes else []
    command += ["--without-removed"] if without_removed else []
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # an interrupt reaches it only from `_wait_for_end`
    )
    code, said = _wait_for_end(process, show)
    step = max((mark.step for mark in list_committed(open_store(uri))), default=0)
    return Ending(code, _END_BY_CODE.get(code, "again"), step, said)


def _wait_for_end(process: "subprocess.Popen[str]", show: bool) -> tuple[int, str]:
    """Return exit code and last output lines of `process`. An interrupt (Ctrl-C) is passed on to it."""
    said: deque[str] = deque(maxlen=_MAX_LINES)
    assert process.stdout is not None
    while True:
        try:
            _collect_lines(process.stdout, said, show)
            return process.wait(), "".join(said)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)


def _collect_lines(lines: IO[str], newest_lines: deque[str], show: bool) -> None:
    for line in lines:
        newest_lines.append(line)
        if show:
            print(line, end="", flush=True)
