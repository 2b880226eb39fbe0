"""A CPU that plays a GPU nobody has met, one of whose kernels misbehaves; and all the ways in which kernels do.

A trial computes kernels in processes of its own, and compiles in one. Those enter here, with the misbehaviour in their
environment.
"""

import ctypes
import importlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from encoder_core.layers import attention
from encoder_core.trials.trial_process import Report, TrialConnection

GPU = "a CPU that plays a GPU"
MODULE = "tests.support.ranks.bad_kernels"
FUNCTIONS = {"blocked": "attend_blocked", "padded": "padded_sdpa", "written": "written_formula"}
"""Kernels of plain attention on a CPU, and which functions of `attention` they are."""
_VARIABLE = "BAD_KERNEL"
_LITTLE = 1 << 28  # bytes beyond what a process has


class Unheard(BaseException):
    """An error that no `except Exception` catches, and that cannot be shown."""

    def __str__(self) -> str:
        raise AttributeError("message")


def _raise(name: str) -> None:
    """A builtin one, or "module:class"."""
    module, _, rest = name.rpartition(":")
    kind = getattr(importlib.import_module(module or "builtins"), rest)
    try:
        error = kind("a library says so \ud800")
    except TypeError:
        error = kind(2, 1, "shared memory")
    raise error


def _allocate(_: Any) -> None:
    """More than the process may have."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _LITTLE, before[1]))
    try:
        torch.ones(1 << 40)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _scribble(_: Any) -> None:
    """Into everything that is open for writing."""
    for number in os.listdir("/proc/self/fd"):
        try:
            os.write(int(number), b"\x00 garbage\n")
        except OSError:
            continue


def _hang(how: Any) -> None:
    match how:
        case "asleep":
            threading.Event().wait()
        case "busy":
            while True:
                pass
        case "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "holding Python's lock":
            ctypes.PyDLL(None).sleep(10_000)


def _change(what: Any) -> None:
    match what:
        case "dtype":
            torch.set_default_dtype(torch.float64)
        case "threads":
            torch.set_num_threads(torch.get_num_threads() + 2)
        case "deterministic":
            torch.set_deterministic_debug_mode("warn")
        case "gradients":
            torch.set_grad_enabled(False)
        case "precision":
            torch.set_float32_matmul_precision("medium")
        case "a thread":
            threading.Thread(target=threading.Event().wait, daemon=True).start()
        case "numbers":
            torch.manual_seed(1234)


def _die(number: Any) -> None:
    os.kill(os.getpid(), number)
    threading.Event().wait()


WAYS: dict[str, Callable[[Any], object]] = {
    "raise": _raise,
    "hang": _hang,
    "exit": os._exit,
    "die": _die,
    "abort": lambda _: os.abort(),
    "segfault": lambda _: ctypes.string_at(0),
    "allocate": _allocate,
    "scribble": _scribble,
    "change": _change,
    "close everything": lambda _: os.closerange(0, 4096),
    "close output": lambda _: [os.close(1), os.close(2)],
    "print": lambda megabytes: [os.write(1, b"so be it\n" * 100_000) for _ in range(megabytes)],
    "kill the rank": lambda _: os.kill(os.getppid(), signal.SIGKILL),
    "leave a process": lambda name: subprocess.Popen([sys.executable, "-c", "import time; time.sleep(999)", name]),
}
RESULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "wrong": lambda context: 1.01 * context,
    "nan": lambda context: context / 0.0,
}


@dataclass(frozen=True)
class Misbehaviour:
    """What a kernel does from its call number `call` on: one of WAYS with its argument, or one of RESULTS."""

    kernel: str
    way: str
    argument: str | int | None = None
    call: int = 1


def serve(request: Report, line: TrialConnection) -> None:
    """In the process of a trial of kernels."""
    from encoder_core.trials import kernel_attempts

    with misbehaving(Misbehaviour(**json.loads(os.environ[_VARIABLE]))):
        kernel_attempts.serve(request, line)


def serve_compiler(request: Report, line: TrialConnection) -> None:
    """In the process of a trial of the compiler, which misbehaves at once."""
    from encoder_core.trials import compile_trial

    how = Misbehaviour(**json.loads(os.environ[_VARIABLE]))
    WAYS[how.way](how.argument)
    compile_trial.serve(request, line)


@contextmanager
def misbehaving(how: Misbehaviour) -> Iterator[None]:
    """In this process."""
    name = FUNCTIONS[how.kernel]
    right, calls = getattr(attention, name), 0

    def kernel(*given: Any) -> Tensor:
        nonlocal calls
        calls += 1
        if calls >= how.call and how.way in WAYS:
            WAYS[how.way](how.argument)
        context: Tensor = right(*given)
        return RESULTS[how.way](context) if calls >= how.call and how.way in RESULTS else context

    with patch.object(attention, name, kernel):
        yield


@contextmanager
def tried_with(how: Misbehaviour) -> Iterator[None]:
    """Trials of this process and of those that it starts meet it."""
    with (
        patch.dict(os.environ, {_VARIABLE: json.dumps(asdict(how))}),
        patch("encoder_core.trials.kernel_trial.TRIAL_FUNCTION", f"{MODULE}:serve"),
        patch("encoder_core.trials.compile_trial.TRIAL_FUNCTION", f"{MODULE}:serve_compiler"),
    ):
        yield


def drawn(draw: random.Random) -> Misbehaviour:
    """Some way in which the kernel `blocked` is of no use, quickly seen."""
    arguments: dict[str, list[Any]] = {
        "raise": ["ValueError", "SystemExit", "KeyboardInterrupt", f"{MODULE}:Unheard"],
        "exit": [0, 1, 255],
        "die": [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL, signal.SIGBUS, signal.SIGTERM],
        "change": ["dtype", "threads", "deterministic", "gradients", "precision", "a thread"],
    }
    others = ["abort", "segfault", "allocate", "scribble", "close everything", *RESULTS]
    way = draw.choice([*arguments, *others])
    return Misbehaviour("blocked", way, draw.choice(arguments.get(way, [None])), draw.randint(1, 3))


RIGHT = Misbehaviour("blocked", "right")
BY_NAME = {
    "right": RIGHT,
    "wrong": Misbehaviour("blocked", "wrong"),
    "broken": Misbehaviour("blocked", "raise", "RuntimeError"),
    "deadly": Misbehaviour("blocked", "die", signal.SIGKILL),
}


@contextmanager
def bad_kernel(how: str | Misbehaviour | None, compiler: Misbehaviour | None = None) -> Iterator[None]:
    """In a rank. `how`: one of `BY_NAME`, or any; None: a CPU as it is. The `compiler` misbehaves instead if told."""
    with ExitStack() as stack:
        how = BY_NAME[how] if isinstance(how, str) else how
        if compiler is not None:
            stack.enter_context(tried_with(compiler))
        elif how is not None:
            stack.enter_context(patch("launcher.runtime.rank.kernels.local_gpu_name", lambda: GPU))
            stack.enter_context(misbehaving(how))
            stack.enter_context(tried_with(how))
        yield
