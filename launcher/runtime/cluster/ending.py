"""`train`: the command, from a notebook or a script, and how it ended."""

import json
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Literal

from checkpoints.listing import committed
from data_service.store.open import open_store
from launcher.contract import FINISHED, MISTAKE, STOPPED

How = Literal["finished", "stopped", "mistake", "again"]
_HOW: dict[int, How] = {FINISHED: "finished", STOPPED: "stopped", MISTAKE: "mistake"}
_KEPT = 200  # lines of what was said


@dataclass(frozen=True)
class Ending:
    """How a start of a run ended.

    Attributes:
        code: of the command (infra/docs/runbook.md).
        how: `finished`; `stopped`, by `maskfleet runs stop`; `mistake`: in what it was given, or what no repetition
            cures, and `said` tells which; `again`: anything else, so call `train` again to go on.
        step: of the newest checkpoint.
        said: the last lines of what was shown.
    """

    code: int
    how: How
    step: int
    said: str


def train(
    uri: str,
    settings: Mapping[str, object] | None = None,
    *,
    accept_changes: bool = False,
    nodes: int = 1,
    show: bool = True,
) -> Ending:
    """Start the run at `uri`, or continue it, as `maskfleet train` does, in a process of its own; returns when it has
    ended. An interrupt (Ctrl-C, a notebook's stop button) is passed on: the run commits a checkpoint and ends.

    Args:
        uri: the run's folder or s3:// URI.
        settings: dotted keys of the recipe and their values, as `--set`.
        accept_changes: let them change what the run is; on record.
        nodes: begin when the Ray cluster in RAY_ADDRESS has so many.
        show: print what the command says.

    Raises:
        StoreError: the run's checkpoints cannot be listed afterwards.
    """
    command = [sys.executable, "-P", "-m", "maskfleet", "train", uri, "--nodes", str(nodes)]
    command += [
        part for key, value in (settings or {}).items() for part in ("--set", f"{key}={json.dumps(value)}")
    ]
    command += ["--accept-changes"] if accept_changes else []
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,  # so that an interrupt reaches it once, from here
    )
    code, said = _follow(process, show)
    step = max((mark.step for mark in committed(open_store(uri))), default=0)
    return Ending(code, _HOW.get(code, "again"), step, said)


def _follow(process: "subprocess.Popen[str]", show: bool) -> tuple[int, str]:
    """Return the process's exit code, and the last of what it said."""
    said: deque[str] = deque(maxlen=_KEPT)
    assert process.stdout is not None
    while True:
        try:
            _pass_on(process.stdout, said, show)
            return process.wait(), "".join(said)
        except KeyboardInterrupt:
            process.send_signal(signal.SIGINT)


def _pass_on(lines: IO[str], said: deque[str], show: bool) -> None:
    for line in lines:
        said.append(line)
        if show:
            print(line, end="", flush=True)
