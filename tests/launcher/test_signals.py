"""Commands that are asked to end, at random moments: a code that says so, a line at most, and nothing left behind."""

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from launcher.command import needs_supervision
from launcher.exit_codes import MISTAKE, REPEAT
from launcher.signals import END_SIGNALS
from maskfleet import REPEATED_COMMANDS
from tests.support.checks.command import command_tree
from tests.support.data.raw_text import tokenizer_folder

_TEXT = 3_000_000  # bytes: each command computes on it for seconds
_LATEST_S = 12.0
_AT_ONCE_S = 0.5  # within which a command ends that had nothing left to do


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Words that nobody wrote, and a tokenizer beside them."""
    folder, draws = tmp_path_factory.mktemp("text"), random.Random(1)
    words = ["".join(draws.choices("abcdefghijklmnop", k=draws.randint(3, 9))) for _ in range(20_000)]
    lines = (" ".join(draws.choices(words, k=12)) for _ in range(_TEXT // 84))
    (folder / "text.txt").write_text("\n".join(lines))
    tokenizer_folder(folder / "tokenizer")
    return folder


def started(command: list[str], temporary: Path) -> "subprocess.Popen[str]":
    """The command, once it answers signals itself: before that, Python does."""
    process = subprocess.Popen(
        [sys.executable, "-m", "maskfleet", *command],
        env=os.environ | {"TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while not caught(process.pid) >> (signal.SIGTERM - 1) & 1 and process.poll() is None:
        time.sleep(0.001)
    return process


def caught(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt"):
                return int(line.split()[1], 16)
    return 0


@pytest.mark.parametrize("draw", [*range(4), *(pytest.param(n, marks=pytest.mark.long) for n in range(4, 90))])
def test_asked_to_end_at_any_moment(text: Path, tmp_path: Path, draw: int) -> None:
    draws, temporary = random.Random(draw), tmp_path / "temporary"
    temporary.mkdir()
    given, tokenizer, out = str(text / "text.txt"), str(text / "tokenizer"), str(tmp_path / "out")
    command = [
        ["tokenizer", "train", given, "--kind", "unigram", "--vocab-size", "9000", "--out", out],
        ["tokenizer", "train", given, "--kind", "wordpiece", "--vocab-size", "9000", "--out", out],
        ["tokenizer", "check", tokenizer, given],
        ["corpus", "build", given, "--tokenizer", tokenizer, "--out", out, "--workers", "1"],
    ][draw % 4]
    number = draws.choice(END_SIGNALS)
    process = started(command, temporary)
    with suppress(subprocess.TimeoutExpired):
        process.wait(draws.uniform(0, draws.choice((0.3, _LATEST_S))))
    asked = process.poll() is None
    sent = time.monotonic()
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    ended_s = time.monotonic() - sent
    assert "Traceback" not in said, said
    assert "Exception ignored" not in said, said
    if process.returncode == 0:  # it was done, or about to be: it did not go on for long
        assert not asked or ended_s < _AT_ONCE_S, said
    else:
        assert asked, said
        code = REPEAT if command[0] == "corpus" else 128 + number  # a build goes on where it was
        assert process.returncode == code, said
    assert not list(temporary.iterdir())


def test_every_command_that_is_supervised_is_among_those_that_are_given_again() -> None:
    supervised = {words for words in command_tree() if needs_supervision(words.split())}
    assert supervised
    assert supervised <= set(REPEATED_COMMANDS)
    assert {words.partition(" ")[0] for words in command_tree()} >= {
        words.partition(" ")[0] for words in REPEATED_COMMANDS
    }


REPEATED = (
    ["train", "no run"],
    ["evaluate", "no suite"],
    ["finetune", "no model", "sst2", "--data", "no folder"],
    ["embed", "train", "no model", "sst2", "--data", "no folder", "--out", "out"],
    ["corpus", "build", "no text", "--tokenizer", "no tokenizer", "--out", "out"],
)


@pytest.mark.parametrize("number", END_SIGNALS)
@pytest.mark.parametrize("command", REPEATED, ids=lambda command: command[0])
@pytest.mark.parametrize("draw", [0, 1, *(pytest.param(n, marks=pytest.mark.long) for n in range(2, 12))])
def test_what_is_given_again_ends_with_its_code_from_the_first_moment_on(
    draw: int, command: list[str], number: signal.Signals, tmp_path: Path
) -> None:
    """While it imports, too; with 2 if it has found by then that what it was given is not there."""
    process = started(command, tmp_path)
    with suppress(subprocess.TimeoutExpired):
        process.wait(draw and random.Random(f"{draw} {command} {number}").uniform(0, 1.5))
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    # A command that has said its mistake may die by the signal while Python ends, which takes its handlers away first.
    ended = "error:" in said and process.returncode == -number
    assert ended or process.returncode in (REPEAT, MISTAKE), said


# Each computes for minutes: where Python hears of a signal at once, where it does not, and where it loses it.
PROGRAM = """
import hashlib, sys, tempfile
from launcher.exit_codes import MISTAKE, REPEAT
from launcher.signals import end_on_signal, signal_response

class Finalised:
    def __del__(self):
        for _ in range(1000):
            pass

def loop():
    while True:
        Finalised()

with end_on_signal(), signal_response(REPEAT, "it stays") if sys.argv[2:] else tempfile.TemporaryDirectory():
    with tempfile.TemporaryFile() as nameless:
        print("ready", flush=True)
        if sys.argv[1] == "library":
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2_000_000_000)
        loop()
"""


@pytest.mark.long
@pytest.mark.parametrize("number", END_SIGNALS)
@pytest.mark.parametrize("arguments", [["python"], ["library", "own"], ["python", "own"]])
def test_one_line_says_what_was_asked(number: signal.Signals, arguments: list[str], tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, said = process.communicate(timeout=120)
    assert process.returncode == (REPEAT if "own" in arguments else 128 + number)
    assert len(said.splitlines()) == 1
    assert ("stays" in said) == ("own" in arguments)
    assert ("Ctrl-C" if number == signal.SIGINT else number.name) in said
    assert not list(tmp_path.iterdir())
