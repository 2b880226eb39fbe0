"""Processes forked from a server that has imported everything: a rank starts in milliseconds, not in four seconds.

They are as separate as started ones: own memory, own signals, an exit code that tells of a signal.
"""

import gc
import os
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

CONTEXT = get_context("forkserver")
# Only what is installed: the server does not know the tests' own folders.
CONTEXT.set_forkserver_preload(
    [
        "launcher.rank.main",
        "launcher.rank.journal",
        "checkpoints.gather",
        "checkpoints.hf.load",
        "data_service.store.s3",
        "torch._dynamo",  # an optimizer imports it, in two seconds
    ]
)


def forked(function: Callable[..., None], *args: Any, output: Path | None = None) -> ForkServerProcess:
    """A process that will call `function(*args)` with this process's environment, and write what it prints to
    `output` if given. `function` must be importable by name."""
    return CONTEXT.Process(target=_call, args=(function, args, dict(os.environ), output))


def enter(environment: dict[str, str]) -> None:
    """Take over the environment of the process that asked: the server has that of its first start. DeepSpeed
    collects garbage again and again; what the server imported need not be looked through each time."""
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)


def _call(
    function: Callable[..., None], args: tuple[Any, ...], environment: dict[str, str], output: Path | None
) -> None:
    enter(environment)
    if output is not None:
        log = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
    function(*args)
