"""A build of one big compressed file, killed at random moments (`--seed`), goes on inside the file."""

import base64
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import zstandard
from tenacity import Retrying, stop_after_delay, wait_fixed

from data_service.ingest.options import BuildOptions
from data_service.store.open import open_store
from tests.support.data.raw_text import DOCUMENTS, SMALL, build, files_of, tokenizer_folder

pytestmark = [pytest.mark.cluster, pytest.mark.long]

ROUNDS = 16  # of half a megabyte each
OPTIONS = SMALL.model_copy(update={"split_bytes": 200_000, "workers": 2})
STAGES = ("measuring", "reading", "comparing", "writing", "assembling", "already built", "clearing up")
READING, WRITING = STAGES.index("reading"), STAGES.index("writing")

_BUILD = """
import sys
from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions
inputs, output, tokenizer, options = sys.argv[1:]
report = lambda progress: print(progress.stage, progress.done, progress.total, sep=":", flush=True)
build_corpus([inputs], output, tokenizer, BuildOptions.model_validate_json(options), report)
"""


class Reported(NamedTuple):
    """Tasks done of a stage, by its number, `at_s` seconds after the command."""

    stage: int
    done: int
    total: int
    at_s: float

    @property
    def reached(self) -> tuple[int, int]:
        return self.stage, self.done


class Kill(NamedTuple):
    """`after_s` seconds after the command or, where `tasks` is given, after so many new ones of the stage were done."""

    after_s: float
    stage: int = 0
    tasks: int = 0


@contextmanager
def folder_of_its_own() -> Iterator[str]:
    """Not kept, as pytest keeps its own. What a killed start leaves of Ray writes a while longer."""
    folder = tempfile.mkdtemp(prefix="maskfleet-")
    try:
        yield folder
    finally:
        for attempt in Retrying(stop=stop_after_delay(60), wait=wait_fixed(0.5), reraise=True):
            with attempt:
                shutil.rmtree(folder)


def write_rounds(path: Path) -> None:
    """The same documents again and again, their paragraphs in another order each time."""
    draw = random.Random(1)
    with zstandard.open(path, "wb") as file:
        for number in range(ROUNDS):
            for text in DOCUMENTS:
                paragraphs = text.split("\n\n")
                draw.shuffle(paragraphs)
                line = json.dumps({"text": f"Round {number}.\n\n" + "\n\n".join(paragraphs)}) + "\n"
                file.write(line.encode())


def write_big(path: Path, size: int) -> None:
    """Documents of random letters with spaces between them, compressed to `size` bytes: to about three quarters."""
    draw = random.Random(1)
    spaces = bytes.maketrans(b"+/0123456789", b" " * 12)
    with path.open("wb") as file, zstandard.ZstdCompressor(level=1).stream_writer(file) as writer:
        while file.tell() < size:
            for _ in range(100):
                text = base64.b64encode(draw.randbytes(draw.randint(1_000, 30_000))).translate(spaces)
                writer.write(b'{"text": "' + text + b'"}\n')


def run(arguments: list[str], kill: Kill | None) -> tuple[int, list[Reported]]:
    """Exit status of a build whose process group is killed, and what it reported."""
    command = [sys.executable, "-c", _BUILD, *arguments]
    began = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        killer = threading.Timer(kill.after_s if kill else 0, os.killpg, (process.pid, signal.SIGKILL))
        if kill is not None and not kill.tasks:
            killer.start()
        reported: list[Reported] = []
        for line in process.stdout:
            stage, done, total = line.rstrip().split(":")
            reported.append(Reported(STAGES.index(stage), int(done), int(total), time.monotonic() - began))
            if kill is not None and kill.tasks and killer.ident is None and _is_due(kill, reported):
                killer.start()
        killer.cancel()
    return process.returncode, reported


def _is_due(kill: Kill, reported: list[Reported]) -> bool:
    stage, done = reported[-1].reached
    before = next(report.done for report in reported if report.stage == stage)
    return (stage, done - before) >= (kill.stage, kill.tasks)


def check_continued(reached: tuple[int, int], reported: list[Reported]) -> None:
    """What was reported was done: the first report of the stage that was reached counts it already."""
    first = next((report for report in reported if report.stage == reached[0]), None)
    assert first is None or first.done >= reached[1]


def test_killed_at_random_moments_it_goes_on_inside_the_file(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    write_rounds(inputs / "big.jsonl.zst")
    build(inputs, tmp_path / "whole", OPTIONS.model_copy(update={"workers": 1}))

    output = str(tmp_path / "new")
    arguments = [str(inputs), output, tokenizer_folder(tmp_path / "tokenizer"), OPTIONS.model_dump_json()]
    began = time.monotonic()
    run([*arguments[:1], str(tmp_path / "timed"), *arguments[2:]], None)
    duration = time.monotonic() - began

    draw = random.Random(request.config.getoption("--seed"))
    reached, kills = (0, 0), 0
    while True:
        kill = Kill(draw.uniform(0.1, 0.8) * duration) if kills < 6 else None
        status, reported = run(arguments, kill)
        check_continued(reached, reported)
        reached = max([reached, *(report.reached for report in reported)])
        if status == 0:
            break
        assert status == -signal.SIGKILL
        kills += 1
    assert kills > 1
    open_store(output).remove_leftovers("", before=None)
    assert files_of(tmp_path / "new") == files_of(tmp_path / "whole") == files_of(tmp_path / "timed")


@pytest.mark.timeout(4 * 3600)
def test_each_start_goes_on_where_the_last_one_was(request: pytest.FixtureRequest) -> None:
    """Of a file of `--big-file-mb`, with splits as a user has them. The build is not completed."""
    draw = random.Random(request.config.getoption("--seed"))
    kills = [
        Kill(draw.uniform(0, 10), READING, draw.randint(1, 8)),
        Kill(draw.uniform(0, 10), WRITING, draw.randint(1, 3)),
        Kill(draw.uniform(0, 10), WRITING, draw.randint(1, 3)),
        Kill(0, WRITING, 1),
    ]
    with folder_of_its_own() as folder:
        inputs = Path(folder, "inputs")
        inputs.mkdir()
        write_big(inputs / "big.jsonl.zst", request.config.getoption("--big-file-mb") * 1_000_000)
        options = BuildOptions(workers=2).model_dump_json()
        tokenizer = tokenizer_folder(Path(folder, "tokenizer"))
        arguments = [str(inputs), str(Path(folder, "corpus")), tokenizer, options]
        reached = (0, 0)
        for number, kill in enumerate(kills, start=1):
            status, reported = run(arguments, kill)
            print(f"start {number}, killed after {reported[-1].at_s:.0f} s:", *_summary(reported), sep="\n  ")
            assert status == -signal.SIGKILL
            check_continued(reached, reported)
            assert max(report.reached for report in reported) > reached
            reached = max(report.reached for report in reported)


def _summary(reported: list[Reported]) -> list[str]:
    """For each stage that a start was in: pieces before, pieces when it ended, seconds to the first new one."""
    lines = []
    for stage in dict.fromkeys(report.stage for report in reported):
        of_stage = [report for report in reported if report.stage == stage]
        first, last = of_stage[0], of_stage[-1]
        new = next((f"{report.at_s:.0f} s" for report in of_stage if report.done > first.done), "never")
        lines.append(
            f"{STAGES[stage]}: {first.done} of {first.total} pieces done at {first.at_s:.0f} s, "
            f"the first new one at {new}, {last.done} ({last.done / last.total:.0%}) at {last.at_s:.0f} s"
        )
    return lines
