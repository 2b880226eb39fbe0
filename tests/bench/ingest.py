"""What it costs to build a corpus of very many documents: python tests/bench/ingest.py.

Documents of about a hundred bytes, all in one JSON Lines file, or a file each in a folder or below an S3 prefix. Each
build is a command of its own; memory is that of its processes at their highest.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import psutil
import typer
from program import BenchError, note, run

from data_service.store.open import open_store

Shape = Literal["one file", "a file each"]
_WORDS = 5_000
_SEEN_EVERY_S = 0.05
_PUTS = 32


@dataclass(frozen=True)
class Cost:
    """What a build took.

    Attributes:
        documents: number of documents.
        shape: how they lie; `place`: below which URI.
        seconds: from its start to its end; `cpu`: processor seconds of all its processes.
        driver, worker: bytes of memory of the command's process, and of the largest worker, at their highest. With
            one worker the command's process does all the work.
    """

    documents: int
    shape: Shape
    place: str
    workers: int
    seconds: float
    cpu: float
    driver: int
    worker: int


def bench_build(
    counts: list[int],
    shape: Shape,
    workers: int,
    place: str | None = None,
    progress: Callable[[str], None] = print,
) -> Iterator[Cost]:
    """Measure a build of each number of documents. `place`: URI below which they lie; None: a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="maskfleet-bench-") as folder:
        _command(
            "tokenizer",
            "train",
            _one_file(Path(folder), 2_000),
            "--vocab-size",
            "2000",
            "--out",
            f"{folder}/t",
        )
        for count in counts:
            root = place or folder
            progress(f"writing {count:,} documents, {shape}, below {root}")
            inputs = (
                _one_file(Path(folder), count)
                if shape == "one file"
                else _a_file_each(f"{root}/{count}", count)
            )
            progress("building")
            yield _measure(
                count,
                shape,
                root,
                [inputs, "--tokenizer", f"{folder}/t", "--out", f"{root}/{shape[:1]}-{count}-{workers}"],
                workers,
            )


def render(costs: list[Cost]) -> str:
    """A table for people."""
    head = ("documents", "shape", "workers", "s", "CPU s", "CPU us a document", "driver MB", "worker MB")
    rows = [
        (
            f"{cost.documents:,}",
            f"{cost.shape}{' (S3)' if '://' in cost.place else ''}",
            f"{cost.workers}",
            f"{cost.seconds:.1f}",
            f"{cost.cpu:.1f}",
            f"{cost.cpu / cost.documents * 1e6:.0f}",
            f"{cost.driver / 1e6:.0f}",
            f"{cost.worker / 1e6:.0f}",
        )
        for cost in costs
    ]
    return "\n".join("".join(f"{cell:>20}" for cell in row) for row in (head, *rows))


def _texts(count: int) -> Iterator[str]:
    """Yield texts of about sixteen words, no two alike."""
    rng = np.random.default_rng(0)
    words = [f"{'kmnprst'[n % 7]}{'aeiou'[n % 5]}{n}" for n in range(_WORDS)]
    for first in range(0, count, 1000):
        drawn = rng.integers(_WORDS, size=(min(1000, count - first), 16))
        for number, row in enumerate(drawn.tolist(), first):
            yield f"Document {number} says {' '.join(words[word] for word in row)}."


def _one_file(folder: Path, count: int) -> str:
    path = folder / f"{count}.jsonl"
    with path.open("w") as file:
        for text in _texts(count):
            file.write(json.dumps({"text": text}) + "\n")
    return str(path)


def _a_file_each(root: str, count: int) -> str:
    store = open_store(root)

    def put(numbered: tuple[int, str]) -> None:
        number, text = numbered
        store.put(f"{number // 1000:04d}/{number:07d}.txt", text.encode())

    with ThreadPoolExecutor(_PUTS) as pool:
        for _ in pool.map(put, enumerate(_texts(count)), chunksize=100):
            pass
    return root


def _measure(count: int, shape: Shape, place: str, arguments: list[str], workers: int) -> Cost:
    began = time.monotonic()
    command = [*_MASKFLEET, "corpus", "build", *arguments, "--workers", str(workers)]
    cpu: dict[int, float] = {}
    memory: dict[int, int] = {}
    names: dict[int, str] = {}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as build:
        while build.poll() is None:
            with suppress(psutil.NoSuchProcess):
                root = psutil.Process(build.pid)
                for process in (root, *root.children(recursive=True)):
                    _look(process, cpu, memory, names)
            time.sleep(_SEEN_EVERY_S)
        said = build.stderr.read() if build.stderr is not None else ""
    if build.returncode:
        raise BenchError(f"the build ended with {build.returncode}: {said[-500:]}", remedy="see the message")
    driver = [
        size for pid, size in memory.items() if not names[pid].startswith(("ray::", "raylet", "gcs_server"))
    ]
    workers_seen = [size for pid, size in memory.items() if names[pid].startswith("ray::")]
    return Cost(
        count,
        shape,
        place,
        workers,
        seconds=time.monotonic() - began,
        cpu=sum(cpu.values()),
        driver=max(driver),
        worker=max(workers_seen, default=0),
    )


def _look(
    process: psutil.Process, cpu: dict[int, float], memory: dict[int, int], names: dict[int, str]
) -> None:
    with suppress(psutil.Error, OSError, IndexError):
        times = process.cpu_times()
        cpu[process.pid] = times.user + times.system
        memory[process.pid] = max(memory.get(process.pid, 0), process.memory_info().rss)
        names[process.pid] = process.cmdline()[0]


_MASKFLEET = [sys.executable, "-c", "from launcher.app.cli.main import main; main()"]


def _command(*arguments: str) -> None:
    subprocess.run(
        [*_MASKFLEET, *arguments], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )


def main(
    documents: Annotated[
        str, typer.Option(help="Numbers of documents, with commas between.")
    ] = "10000,100000,1000000",
    shape: Annotated[str, typer.Option(help="`one file`, or `a file each`.")] = "one file",
    workers: Annotated[
        int, typer.Option(min=1, help="With one, the command's process does all the work.")
    ] = 1,
    place: Annotated[
        str | None, typer.Option(help="Folder or s3:// URI for the files; default: a temporary folder.")
    ] = None,
) -> None:
    """What `corpus build` of very many documents costs: seconds, and memory of the driver and of a worker."""
    if shape not in ("one file", "a file each"):
        raise BenchError(f"--shape {shape} is unknown", remedy="give `one file` or `a file each`")
    counts = [int(count) for count in documents.split(",")]
    chosen: Shape = "one file" if shape == "one file" else "a file each"
    typer.echo(render(list(bench_build(counts, chosen, workers, place, note))))


if __name__ == "__main__":
    run(main)
