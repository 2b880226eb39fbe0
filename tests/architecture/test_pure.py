"""Pure tests are what they claim: no process, server, Ray or training. And there are some of every core idea."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.checks.pure import WHOLE, NotPure, guarded, is_pure

ROOT = Path(__file__).parents[2]
CORE = {
    "data_service": ("corpus", "samples", "store", "stream", "tokenizers"),
    "encoder_core": ("families", "heads", "layers", "objectives", "optim"),
    "launcher": (
        *("runtime/policies", "runtime/recipe", "runtime/run"),
        *("plan/estimate", "observe/inspect", "after/tasks"),
    ),
    "checkpoints": ("",),
}
IMPURE = {
    "a process by itself": "launcher/test_command.py",
    "ranks": "encoder_core/train/test_engine.py",
    "Ray, through a helper": "cluster/test_hang.py",
    "DeepSpeed, through the product": "launcher/runtime/rank/test_checkpointing.py",
    "a server": "faults/store/test_requests.py",
    "transformers": "parity/test_bert.py",
    "a build": "data_service/ingest/test_heldout.py",
    "the command line": "launcher/app/cli/test_remedies.py",
}


def connect() -> None:
    with socket.socket() as line:
        line.connect(("127.0.0.1", 9))


STRIKES: dict[str, Callable[[], object]] = {
    "subprocess": lambda: subprocess.run(["true"]),
    "system": lambda: os.system("true"),
    "fork": os.fork,
    "connect": connect,
    "serve": lambda: socket.create_server(("127.0.0.1", 0)),
    "Ray": lambda: __import__("ray.no_such_module"),
}


@pytest.mark.parametrize("room", [f"{package}/{room}" for package, rooms in CORE.items() for room in rooms])
def test_every_core_room_has_pure_tests(room: str) -> None:
    tests = (ROOT / "tests" / room).glob("test_*.py")
    assert [path.name for path in tests if is_pure(path)]


def test_the_modules_that_stand_for_a_whole_are_there() -> None:
    assert [str(module) for module in WHOLE if not module.is_file()] == []


@pytest.mark.parametrize("why", IMPURE)
def test_what_a_file_reaches_makes_it_impure(why: str) -> None:
    assert not is_pure(ROOT / "tests" / IMPURE[why])


@pytest.mark.parametrize("strike", STRIKES)
def test_a_pure_test_fails_where_it_is_not(strike: str) -> None:
    with guarded("a test"), pytest.raises(NotPure, match="a test"):
        STRIKES[strike]()


def test_with_the_option_only_pure_tests_are_collected_and_nothing_foreign_is_imported() -> None:
    """The session itself says whether anything was."""
    folders = [
        f"tests/{place}"
        for place in (
            "launcher/runtime/policies",
            "launcher/runtime/cluster",
            "encoder_core/optim",
            "cluster",
        )
    ]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--pure",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        *folders,
    ]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    files = {line.partition("::")[0] for line in shown.stdout.splitlines() if "::" in line}
    assert {
        "tests/encoder_core/optim/test_groups.py",
        "tests/launcher/runtime/policies/test_watchdog.py",
    } <= files
    assert all(is_pure(ROOT / file) for file in files)
