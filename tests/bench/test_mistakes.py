"""Mistakes of a beginner end in a message that helps, soon, and without a traceback. No command is silent for long."""

import re
import sys
from pathlib import Path

import pytest
from mistakes import MISTAKES, Answer, answer, prepare, row

from tests.launcher.app.cli.test_said_at_once import RIGHT
from tests.support.checks.silence import seen

pytestmark = pytest.mark.long
_SOON_S = 20.0  # of a CPU: a command that looks into a run imports torch


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mistakes")


@pytest.fixture(scope="module")
def places(place: Path) -> dict[str, str]:
    found = prepare(place)
    (place / "data").mkdir()
    return found | {"data": str(place / "data")}


def helps(one: Answer) -> bool:
    """Whether it is an end of a mistake, and says what to do: our remedy, or where the usage is told."""
    text = one.seen.text
    told = "remedy: " in text or "--help" in text or "Usage:" in text
    return one.seen.code == 2 and told and "Traceback" not in text and one.seen.cpu < _SOON_S


def test_mistakes_of_a_beginner(places: dict[str, str], place: Path) -> None:
    answers = [answer(typed, places, place) for typed in MISTAKES]
    print("\n".join(row(one, places) for one in answers))
    assert [(one.typed, one.seen.code, one.seen.text) for one in answers if not helps(one)] == []
    unnamed = [
        (one.typed, one.told)
        for one in answers
        if not re.search(MISTAKES[one.typed], _unboxed(one.seen.text))
    ]
    assert unnamed == []
    assert not any(Path(places["new"]).rglob("*")), "a mistake leaves nothing"


def test_no_command_is_silent_for_long(places: dict[str, str], place: Path) -> None:
    """Every command that ends well on a small run, in a log and on a terminal by turns: something appears within 3 s of
    its own time, and then at least every 10 s. On a busy machine both are stretched.
    """
    lines = [
        "tokenizer train {records} --out {place}/t --vocab-size 320",
        "tokenizer check {place}/t {records}",
        "corpus build {records} --tokenizer {place}/t --out {place}/c --heldout 0.1",
        "corpus stats {place}/c",
        "corpus show {place}/c",
        "corpus verify {place}/c",
        "init quickstart {place}/r --corpus {place}/c --tiny --set phases.0.steps=6 "
        "--set schedule.warmup=2 --set trainers=1",
        "estimate quickstart --nodes 1 --gpus-per-node 8 --gpu H100",
        "train {place}/r",
        "runs status {place}/r",
        "show {place}/r --step 1",
        "checkpoints list {place}/r",
        "checkpoints verify {place}/r",
        "checkpoints export {place}/r --out {place}/m",
        "report {place}/r --out {place}/r.html",
        "diagnose {place}/m --text {text}",
        "recipe list",
        "recipe from {place}/m",
        "runs fork {place}/r {place}/f --set phases.0.steps=9",
        "doctor {place}",
    ]
    found = []
    for number, line in enumerate(lines):
        words = [word.format(**places, place=place) for word in line.split()]
        done = seen([sys.executable, "-m", "maskfleet", *words], cwd=place, terminal=bool(number % 2))
        assert done.code in (0, 1), (line, done.text)  # 1: `doctor` finds something
        found.append((line.partition(" {")[0], done))
        print(f"| `{found[-1][0]}` | {done.seconds:.1f} | {done.cpu:.1f} | {done.silence:.1f} |", flush=True)
    stretched = {name: max(1.0, done.seconds / max(done.cpu, 0.1)) for name, done in found}
    assert [(name, done.silence) for name, done in found if done.silence > 12 * stretched[name]] == []
    assert {line.split()[0] for line in lines} <= {command.split()[0] for command in RIGHT}


def _unboxed(text: str) -> str:
    return " ".join(re.sub(r"[│╭╮╰╯─]+", " ", text).split())
