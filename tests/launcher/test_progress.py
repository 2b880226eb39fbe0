"""Whatever lasts shows what it does, how far it is and how long still; nothing else on the screen is disturbed."""

import re
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.store.open import open_store
from launcher.output import human_duration
from launcher.progress import BYTES_UNIT, Work, _ProgressDisplay
from tests.support.checks.silence import seen
from tests.support.data.corpora import random_block, write_corpus
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.s3 import S3Server


def on_screen(text: str) -> list[str]:
    """The lines that a terminal shows in the end of `text`; what was rewritten has gone."""
    lines, column = [""], 0
    index = 0
    while index < len(text):
        if text.startswith("\x1b[K", index):
            lines[-1] = lines[-1][:column]
            index += 3
            continue
        letter = text[index]
        if letter == "\n":
            lines.append("")
            column = 0
        elif letter == "\r":
            column = 0
        else:
            lines[-1] = lines[-1][:column] + letter + lines[-1][column + 1 :]
            column += 1
        index += 1
    return lines


_TICK = 0.25
# What a command does, one after another: seconds, and lines that it prints at the end of each.
_LASTING = [0.1, 1.0, 2.9, 3.5, 8.0]
LOG = st.lists(st.tuples(st.sampled_from([*_LASTING, 30.0, 400.0]), st.integers(0, 2)), max_size=8)
TERMINAL = st.lists(st.tuples(st.sampled_from(_LASTING), st.integers(0, 2)), max_size=5)


class Shown:
    """A screen at times of our own; what it and the command write is in one stream."""

    def __init__(self, columns: int | None) -> None:
        self.now, self.stream = 1000.0, ""
        self.said: list[tuple[float, str]] = []
        width = None if columns is None else lambda: columns
        self.screen = _ProgressDisplay(self._write, width, self.now)

    def _write(self, data: bytes) -> None:
        self.said.append((self.now, data.decode()))
        self.stream += data.decode()

    def last(self, work: Work | None, seconds: float) -> None:
        for _ in range(round(seconds / _TICK)):
            self.now += _TICK
            self.screen.tick(work, self.now)

    def print(self, text: str) -> None:
        self.screen.clear_before_write(text, self.now)
        self.stream += text


@given(parts=LOG)
def test_in_a_log_nothing_lasts_unseen(parts: list[tuple[float, int]]) -> None:
    shown = Shown(None)
    heard = [shown.now]
    for number, (seconds, lines) in enumerate(parts):
        begin = shown.now
        shown.last(Work(f"part {number}", None, "", begin), seconds)
        mine = [at for at, text in shown.said if text.startswith(f"part {number}:")]
        # At most as long after 3 s as another line may have come just before.
        assert mine or seconds < 3 + 3 + 2 * _TICK
        assert not mine or mine[0] - begin <= 3 + 3 + 2 * _TICK
        for _ in range(lines):
            shown.print("a line\n")
            heard.append(shown.now)
    heard = sorted([*heard, *(at for at, _ in shown.said), shown.now])
    gaps = [later - earlier for earlier, later in pairwise(heard)]
    assert max(gaps) <= 60 + _TICK
    early = [later - earlier for earlier, later in pairwise(heard) if later <= 1600]
    assert max(early, default=0) <= 10 + _TICK
    assert len(shown.said) <= 2 + len(parts) + (shown.now - 1000) / 10, "no flood"
    assert "\r" not in shown.stream
    assert "\x1b" not in shown.stream


@pytest.mark.long
@given(parts=TERMINAL, columns=st.sampled_from([20, 80, 300]))
def test_on_a_terminal_one_line_is_rewritten_and_all_others_stay(parts: list[tuple[float, int]], columns: int) -> None:
    shown, printed = Shown(columns), []
    for number, (seconds, lines) in enumerate(parts):
        shown.last(Work(f"part {number} of some work", 1000, "rows", shown.now), seconds)
        if seconds >= 2:
            assert on_screen(shown.stream)[-1].startswith(f"part {number} of")
        assert all(len(line) < columns for line in on_screen(shown.stream)[-1:])
        for line in range(lines):
            shown.print(f"line {number} {line}\n")
            printed.append(f"line {number} {line}")
    shown.screen.clear()
    assert on_screen(shown.stream) == [*printed, ""]


def test_half_a_line_of_others_is_left_alone() -> None:
    shown = Shown(80)
    shown.print("an answer: ")
    shown.last(Work("something", None, "", shown.now), 5)
    shown.print("42\n")
    assert on_screen(shown.stream) == ["an answer: 42", ""]


@given(
    total=st.integers(1, 10**9),
    done=st.integers(0, 10**9),
    before=st.integers(0, 10**9),
    age=st.floats(1, 1e6),
)
def test_what_is_left_goes_by_the_pace_of_this_command(total: int, done: int, before: int, age: float) -> None:
    done, before = min(done, total), min(before, done, total)
    work = Work("reading", total, BYTES_UNIT, 0.0)
    work.set_already_done(before)
    work.set_done(done)
    left = re.search(r"about (.+) left", work.describe(age))
    assert (left is not None) == (done > before)
    if done == total and left is not None:
        assert left[1] == "0.0s"


@given(half=st.integers(1, 10**9), before=st.integers(0, 10**6), age=st.floats(1, 1e6))
def test_after_half_of_it_as_much_is_left(half: int, before: int, age: float) -> None:
    work = Work("reading", before + 2 * half, BYTES_UNIT, 0.0)
    work.set_already_done(before)
    work.advance(half)
    assert work.describe(age).endswith(f", about {human_duration(age)} left")


@pytest.mark.parametrize("terminal", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_slow_store_does_not_silence_a_command(
    s3: S3Server, faults: FaultProxy, tmp_path: Path, terminal: bool
) -> None:
    """`corpus verify` of a store that thinks about every request, as a process."""
    uri = f"s3://{s3.new_bucket()}/corpus"
    made = open_store(write_corpus(tmp_path / "corpus", [random_block(seed, 200) for seed in range(16)]))
    for entry in made.list():
        open_store(uri).put(entry.key, made.get(entry.key))

    def thinks(method: str, path: str) -> bool:
        if path.endswith(".tar"):
            threading.Event().wait(0.3)
        return False

    faults.only = thinks
    done = seen([sys.executable, "-m", "maskfleet", "corpus", "verify", uri], terminal=terminal)
    assert done.code == 0, done.text
    assert re.search(r"reading and comparing: .+ of .+, about .+ left", done.text)
    assert done.silence < max(15, done.seconds / 2)  # a busy machine takes long to import
    shown = on_screen(done.text.replace("\r\n", "\n"))
    assert "0 damaged" in shown[-2]
    assert terminal == ("\r" in done.text.replace("\r\n", "\n"))
    assert not terminal or len(shown) == 2, shown
