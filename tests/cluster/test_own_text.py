"""The README's way and the demo's, as commands, on own text of every kind: from a file to a trained run."""

import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from launcher.run.history import read_history
from launcher.run.record import open_run
from tests.support.checks.figures import ensure_possible

SIZE = 1_000_000
pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(3600)]


def paragraphs(size: int, seed: int = 1) -> str:
    """Paragraphs of made-up words of unequal frequency; no two alike."""
    draw = random.Random(seed)
    words = [f"w{int(draw.paretovariate(0.7)) % 5000}" for _ in range(20_000)]
    found, length = list[str](), 0
    while length < size:
        sentences = (
            " ".join(draw.choices(words, k=draw.randint(4, 20))).capitalize() + "."
            for _ in range(draw.randint(2, 8))
        )
        found.append(" ".join(sentences))
        length += len(found[-1]) + 2
    return "\n\n".join(found)


def chinese(size: int) -> str:
    draw = random.Random(2)
    marks = [chr(0x4E00 + int(draw.paretovariate(0.5)) % 3000) for _ in range(20_000)]
    return "".join("".join(draw.choices(marks, k=draw.randint(5, 40))) + "。" for _ in range(size // 70))


def one_text(folder: Path) -> Path:
    (folder / "a.txt").write_text(paragraphs(SIZE))
    return folder / "a.txt"


def one_line(folder: Path) -> Path:
    (folder / "a.txt").write_text(" ".join(paragraphs(SIZE).split()))
    return folder / "a.txt"


def other_line_ends(folder: Path) -> Path:
    (folder / "a.txt").write_bytes(paragraphs(SIZE).replace("\n", "\r\n").encode())
    return folder / "a.txt"


def in_chinese(folder: Path) -> Path:
    (folder / "a.txt").write_text(chinese(SIZE))
    return folder / "a.txt"


def compressed(folder: Path) -> Path:
    (folder / "a.txt.gz").write_bytes(gzip.compress(paragraphs(SIZE).encode()))
    return folder / "a.txt.gz"


def folder_of_texts(folder: Path) -> Path:
    for number in range(40):
        (folder / f"{number}.txt").write_text(paragraphs(SIZE // 40, number))
    return folder


def few_long_lines(folder: Path) -> Path:
    texts = [paragraphs(SIZE // 4, seed) for seed in range(4)]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return folder / "a.jsonl"


def many_short_rows(folder: Path) -> Path:
    pq.write_table(
        pa.table({"text": [paragraphs(200, seed) for seed in range(SIZE // 400)]}), folder / "a.parquet"
    )
    return folder / "a.parquet"


KINDS = (
    one_text,
    one_line,
    other_line_ends,
    in_chinese,
    compressed,
    folder_of_texts,
    few_long_lines,
    many_short_rows,
)


def maskfleet(folder: Path, *arguments: object) -> str:
    """Standard output of a command that is to succeed."""
    program = Path(sys.executable).with_name("maskfleet")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("write", KINDS)
def test_the_readmes_way(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    (tmp_path / "text").mkdir()
    text = write(tmp_path / "text")
    maskfleet(tmp_path, "tokenizer", "train", text, "--out", "tokenizer")
    built = maskfleet(tmp_path, "corpus", "build", text, "--tokenizer", "tokenizer", "--out", "corpus")
    assert "held out for evaluation: " in built
    short = ["--set", "phases.0.steps=30", "--set", "schedule.warmup=5", "--set", "evaluation.every.steps=15"]
    maskfleet(tmp_path, "init", "roberta-base", "run", "--corpus", "corpus", "--tiny", *short)
    maskfleet(tmp_path, "train", "run")
    assert [
        int(record["step"]) for record in read_history(open_run(str(tmp_path / "run")).store).evaluations
    ][-1] == 30


@pytest.mark.parametrize("write", [one_text, in_chinese, few_long_lines])
def test_the_demos_way(tmp_path: Path, write: Callable[[Path], Path]) -> None:
    (tmp_path / "text").mkdir()
    said = maskfleet(tmp_path, "demo", write(tmp_path / "text"), "--out", "demo")
    assert len(ensure_possible(said)) > 6
    assert "stretches between the bounds of paragraphs" in said
    assert (tmp_path / "demo/report.html").stat().st_size > 10_000
