"""Builds over real Ray: the same bytes from any number of workers, workers killed, errors as themselves."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from data_service.errors import InputError
from data_service.ingest import ray_pool
from data_service.ingest.build import build_corpus
from data_service.ingest.pool import Progress
from data_service.ingest.streamed import PieceReader
from data_service.store.open import open_store
from tests.support.data.raw_text import DOCUMENTS, SMALL, build, files_of, tokenizer_folder, write_jsonl, write_mixture

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("alone")]
FINE = SMALL.model_copy(update={"split_bytes": 20_000})


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("ray") / "inputs")


@pytest.fixture(scope="module")
def expected(inputs: Path) -> dict[str, bytes]:
    """What one process without Ray builds."""
    build(inputs, inputs.parent / "alone")
    return files_of(inputs.parent / "alone")


@pytest.mark.parametrize("workers", [2, pytest.param(3, marks=pytest.mark.long)])
def test_any_number_of_workers_writes_the_same_bytes(
    tmp_path: Path, inputs: Path, expected: dict[str, bytes], workers: int
) -> None:
    build(inputs, tmp_path / "corpus", SMALL.model_copy(update={"workers": workers}))
    assert files_of(tmp_path / "corpus") == expected


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compressed files of many splits, with others between them."""
    folder = tmp_path_factory.mktemp("big") / "inputs"
    write_jsonl(folder / "a.jsonl.gz", DOCUMENTS[:40])
    write_jsonl(folder / "b.jsonl", DOCUMENTS[30:50])
    write_jsonl(folder / "c.jsonl.zst", DOCUMENTS[45:])
    return folder


@pytest.fixture(scope="module")
def big_alone(big: Path) -> dict[str, bytes]:
    build(big, big.parent / "alone", FINE)
    return files_of(big.parent / "alone")


@pytest.mark.long
@pytest.mark.parametrize("victim", [ray_pool._run_single_threaded.__name__, PieceReader.__name__])
def test_pieces_of_a_big_file_come_out_the_same_when_its_reader_or_a_worker_dies(
    tmp_path: Path, big: Path, big_alone: dict[str, bytes], victim: str
) -> None:
    killed: list[int] = []

    def kill_one(progress: Progress) -> None:
        if progress.stage not in ("reading", "writing") or len(killed) >= 4:
            return
        for process in psutil.Process().children(recursive=True):
            if process.pid not in killed and victim in process.name() + " ".join(process.cmdline()):
                os.kill(process.pid, signal.SIGKILL)
                killed.append(process.pid)
                return

    tokenizer = tokenizer_folder(big.parent / "tokenizer")
    options = FINE.model_copy(update={"workers": 3})
    build_corpus([str(big)], str(tmp_path / "corpus"), tokenizer, options, kill_one)
    assert len(killed) > 1
    assert files_of(tmp_path / "corpus") == big_alone


_BUILD = """
import sys
from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions
inputs, output, tokenizer, options = sys.argv[1:]
report = lambda progress: print(progress.stage, flush=True)
build_corpus([inputs], output, tokenizer, BuildOptions.model_validate_json(options), report)
"""


@pytest.mark.long
@pytest.mark.parametrize("stage", ["reading", "writing"])
def test_the_process_is_killed_and_the_build_continued(
    tmp_path: Path, inputs: Path, expected: dict[str, bytes], stage: str
) -> None:
    tokenizer = tokenizer_folder(inputs.parent / "tokenizer")
    arguments = [str(inputs), str(tmp_path / "corpus"), tokenizer, SMALL.model_dump_json()]
    command = [sys.executable, "-c", _BUILD, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == stage:
                process.kill()
    assert process.returncode == -signal.SIGKILL
    assert "manifest.json" not in files_of(tmp_path / "corpus")
    build(inputs, tmp_path / "corpus")
    open_store(tmp_path / "corpus").remove_leftovers("", older_than_key=None)
    assert files_of(tmp_path / "corpus") == expected


def test_an_error_of_the_data_is_raised_as_it_is(tmp_path: Path) -> None:
    for number in range(4):
        write_jsonl(tmp_path / f"inputs/{number}.jsonl", DOCUMENTS[number * 9 : number * 9 + 9])
    (tmp_path / "inputs/2.jsonl").write_text('{"text": "good"}\n{"bad\n')
    with pytest.raises(InputError, match=r"2\.jsonl, line 2: not JSON") as failure:
        build(tmp_path / "inputs", tmp_path / "corpus", SMALL.model_copy(update={"workers": 2}))
    assert type(failure.value) is InputError
    assert failure.value.remedy


def test_an_error_of_the_reader_is_raised_as_it_is(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "inputs/a.jsonl.gz", DOCUMENTS)
    tokenizer = tokenizer_folder(tmp_path / "tokenizer")

    def cut_short(progress: Progress) -> None:
        if progress.stage == "reading":
            path.write_bytes(path.read_bytes()[:-5000].ljust(path.stat().st_size, b"x"))

    options = FINE.model_copy(update={"workers": 2})
    with pytest.raises(InputError, match=r"a\.jsonl\.gz.*\bgz\b") as failure:
        build_corpus([str(path)], str(tmp_path / "corpus"), tokenizer, options, cut_short)
    assert type(failure.value) is InputError
