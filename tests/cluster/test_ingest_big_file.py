"""A build of one big compressed file, killed at random moments (`--seed`), goes on inside the file."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zstandard
from raw_text import DOCUMENTS, SMALL, build, files_of, tokenizer_folder

from data_service.store.open import open_store

pytestmark = [pytest.mark.cluster, pytest.mark.long]

ROUNDS = 16  # of half a megabyte each
OPTIONS = SMALL.model_copy(update={"split_bytes": 200_000, "workers": 2})
STAGES = ("measuring", "reading", "comparing", "writing", "assembling", "already built", "clearing up")

_BUILD = """
import sys
from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions
inputs, output, tokenizer, options = sys.argv[1:]
report = lambda progress: print(f"{progress.stage}: {progress.done}", flush=True)
build_corpus([inputs], output, tokenizer, BuildOptions.model_validate_json(options), report)
"""


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


def run(arguments: list[str], kill_after_s: float | None) -> tuple[int, list[tuple[int, int]]]:
    """Exit status, and what was reported: (number of the stage, tasks done in it)."""
    command = [sys.executable, "-c", _BUILD, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        killer = threading.Timer(kill_after_s or 0, lambda: os.killpg(process.pid, signal.SIGKILL))
        if kill_after_s is not None:
            killer.start()
        reported = [line.rstrip().partition(": ") for line in process.stdout]
        killer.cancel()
    return process.returncode, [(STAGES.index(stage), int(done)) for stage, _, done in reported]


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
        limit = draw.uniform(0.1, 0.8) * duration if kills < 6 else None
        status, reported = run(arguments, limit)
        for stage in {stage for stage, _ in reported if stage == reached[0]}:
            # What was reported was done: the first report of the stage counts it already.
            assert next(done for number, done in reported if number == stage) >= reached[1]
        reached = max([reached, *reported])
        if status == 0:
            break
        assert status == -signal.SIGKILL
        kills += 1
    assert kills > 1
    open_store(output).remove_leftovers("", older_than_s=0)
    assert files_of(tmp_path / "new") == files_of(tmp_path / "whole") == files_of(tmp_path / "timed")
