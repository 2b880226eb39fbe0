"""Mistakes of a beginner end in a message that helps, soon, and without a traceback. No command is silent for long.

`infra/test -m long tests/bench/test_mistakes.py -rP` prints what took how long.
"""

import re
import sys
from pathlib import Path

import pytest

from tests.support.checks.silence import SeenCommand, seen
from tests.support.runs.small_runs import new_run, prepare_corpus

pytestmark = pytest.mark.long
_SOON_S = 20.0  # of a CPU: a command that looks into a run imports torch
MACHINES = "--nodes 2 --cpus-per-node 4 --memory 8GiB"
MISTAKES = {
    # What is typed, and what the answer must name. Braces: the places of the fixture; `new` and `gone` are not there.
    "trian {run}": "train",
    "watch {run}": "runs watch",
    "train": "RUN",
    "train {gone}": "init",
    "train {corpus}": "no run at",
    "train {run} --learning-rate 1e-4": "--set",
    "train {run} --set lr=1e-4": "optimizer",
    "train {run} --set zero": "a.b=value",
    "train {run} --set zero=7": "zero",
    "train {run} --set model.layers=3": "runs fork",
    "train {run} --nodes 0": "--nodes",
    "init roberta-bse {new}": "roberta-base",
    "init quickstart": "RUN",
    "init roberta-base {new}": "--corpus",
    "init quickstart {new} --corpus {gone}": "corpus build",
    "init quickstart {new} --corpus {text}": "no corpus at",
    "init quickstart {run} --corpus {corpus}": "exists|already",
    "init {broken} {new}": "line",
    "init quickstart {new} --corpus {corpus} --tokenizer {gone}": "tokenizer",
    "tokenizer train {gone} --out {new}": "no such file",
    "tokenizer train {picture} --out {new}": ".txt",
    "tokenizer train {latin} --out {new}": "--encoding",
    "tokenizer train {empty} --out {new}": "text",
    "tokenizer train {text} --out {tokenizer}": "--replace",
    "tokenizer train {text}": "--out",
    "tokenizer train {text} --out {new} --kind bpe2": "byte_bpe",
    "tokenizer check {gone} {text}": "tokenizer",
    "corpus build {text} --out {new}": "--tokenizer",
    "corpus build {text} --out {new} --tokenizer {gone}": "tokenizer train",
    "corpus build {records} --out {new} --tokenizer {tokenizer} --text-field content": "content",
    "corpus build {text} --out {new} --tokenizer {tokenizer} --heldout 5": "--heldout",
    "corpus build {records} --out {corpus} --tokenizer {tokenizer}": "--out|another|other",
    "corpus build s3://your-bucket/text --out {new} --tokenizer {tokenizer}": "your-bucket is a placeholder",
    "corpus stats {run}": "no corpus at",
    "corpus show {corpus} --index 99999": "99,?999|documents",
    "recipe show roberta-base --set optimizer.adam.lr=1": "adamw",
    "estimate roberta-base --gpu H100": "--gpus-per-node",
    "estimate roberta-base --nodes 1 --gpus-per-node 8 --gpu RTX4090": "H100",
    "estimate roberta-base --nodes 1 --gpus-per-node 8 --gpu H100 --text lots": "160GB",
    "show {run} --step 999999": "step",
    "checkpoints export {run} --out {new}": "train",
    "runs status {gone}": "no run",
    "runs fork {run} {new}": "checkpoint",
    f"launch slurm {{run}} {MACHINES} --time tomorrow": "24:00:00",
    "launch slurm {run} --nodes 2 --cpus-per-node 4 --memory lots": "--memory",
    "finetune {gone} sst2": "no folder",
    "finetune {model} sst3": "sst2",
    "finetune {model} sst2 --out {new}": "--data",
    "embed eval {gone} stsb --data {new}": "no folder|--data",
    "evaluate {model} glue": "--results",
    "corpus build {text} --tokenizer {tokenizer}": "--out",
    "report {gone}": "no run",
    "tasks check {broken}": "line|mine.yaml|broken.yaml",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mistakes")


@pytest.fixture(scope="module")
def places(place: Path) -> dict[str, str]:
    """Text, a tokenizer, a corpus, a run that has not trained yet, and things that are none of these, by name."""
    prepare_corpus(place)
    (place / "text.txt").write_text("Some text of one's own. And a second sentence.\n" * 50)
    (place / "latin.txt").write_bytes("Grüße aus Köln. Schöne Wörter überall.\n".encode("latin-1") * 50)
    (place / "empty.txt").write_text("")
    (place / "picture.png").write_bytes(b"\x89PNG\r\n")
    (place / "broken.yaml").write_text("name: mine\nmodel: {family: roberta\n")
    (place / "model").mkdir()
    (place / "model/config.json").write_text('{"model_type": "bert"}')
    named = {name: str(place / name) for name in ("corpus", "tokenizer", "model", "new", "gone")}
    files = {"text": "text.txt", "latin": "latin.txt", "empty": "empty.txt", "picture": "picture.png"}
    files |= {"broken": "broken.yaml", "records": "text.jsonl"}
    return {
        **named,
        **{name: str(place / file) for name, file in files.items()},
        "run": new_run(place, str(place / "run")),
    }


def helps(answer: SeenCommand) -> bool:
    """Whether it is an end of a mistake, and says what to do: our remedy, or where the usage is told."""
    told = "remedy: " in answer.text or "--help" in answer.text or "Usage:" in answer.text
    return answer.code == 2 and told and "Traceback" not in answer.text and answer.cpu < _SOON_S


def test_mistakes_of_a_beginner(places: dict[str, str], place: Path) -> None:
    unhelpful, unnamed = [], []
    for typed, named in MISTAKES.items():
        words = [word.format(**places) for word in typed.split()]
        alone = {"AWS_EC2_METADATA_DISABLED": "true", "COLUMNS": "200"}
        answer = seen([sys.executable, "-m", "maskfleet", *words], cwd=place, env=alone)
        print(f"{typed}: {answer.cpu:.1f} s of a CPU\n{answer.text}", flush=True)
        if not helps(answer):
            unhelpful.append((typed, answer.code, answer.text))
        if not re.search(named, _unboxed(answer.text)):
            unnamed.append((typed, answer.text))
    assert unhelpful == []
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


def _unboxed(text: str) -> str:
    return " ".join(re.sub(r"[│╭╮╰╯─]+", " ", text).split())
