"""`corpus prepare` over real text of five kinds: python tests/bench/prepare.py INPUTS WORK, of `prepare_inputs.py`

1. Prepared by one worker, undisturbed: documents in are documents out and those dropped by reason, and as many as the
   program counted that made the inputs.
2. Prepared by two workers, and killed at random moments with all processes: the same bytes.
3. A part of the same texts through datatrove's quality filters: by `corpus prepare`, and by datatrove's own pipeline.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile
from typing import Annotated, Any

import pyarrow.parquet as pq
import typer
import yaml
from program import BenchError, note, run

STAGES: list[dict[str, object]] = [
    {"stage": "length", "least_words": 20},
    {"stage": "url_filter"},
    {"stage": "exact_duplicates"},
    {"stage": "pii"},
]
BLOCKS: list[dict[str, object]] = [
    {"stage": name} for name in ("gopher_quality", "gopher_repetition", "fineweb_quality")
]
_COMMAND = [sys.executable, "-m", "maskfleet", "corpus", "prepare"]


@dataclass(frozen=True)
class Cost:
    """Seconds of the clock, and CPU seconds of the process and those that it waited for."""

    wall_s: float
    cpu_s: float


@dataclass(frozen=True)
class Found:
    """What was found.

    Attributes:
        statistics: what the undisturbed preparation says of itself.
        alone: its cost, while the other one runs beside it.
        kills: seconds after which the other one was killed, and the last pass to its end.
        equal: whether both left the same objects.
        uncounted: sources of which documents in are not documents out and dropped, or not what was made.
        ours, peer: cost of the same filters over the same texts, and documents kept.
        part_bytes: bytes of these texts.
    """

    statistics: dict[str, Any]
    alone: Cost
    kills: list[float]
    equal: bool
    uncounted: list[str]
    ours: tuple[Cost, int]
    peer: tuple[Cost, int]
    part_bytes: int


def settings(inputs: Path, stages: list[dict[str, object]]) -> dict[str, object]:
    """Return the preparation of the inputs that `prepare_inputs.py` made."""
    named: dict[str, dict[str, Any]] = {
        "wiki": {"files": ["*.xml.bz2"], "fields": {"id": "id", "url": "url", "date": "date"}},
        "web": {"files": ["web.warc.gz"], "fields": {"id": "id", "url": "url", "date": "date"}},
        "prose": {"files": ["prose-*"], "fields": {"id": "id"}},
        "packages": {"files": ["packages-*.jsonl"], "fields": {"licence": "licence"}},
        "notes": {"files": ["notes"]},
    }
    sources = [
        {
            "source": name,
            "on_bad_records": "skip",
            **entry,
            "files": [f"{inputs}/{file}" for file in entry["files"]],
        }
        for name, entry in named.items()
    ]
    return {"inputs": sources, "stages": stages}


def prepared(settings_file: Path, out: Path, workers: int) -> Cost:
    """Prepare to the end. Raises BenchError: the command failed."""
    return _timed([*_COMMAND, str(settings_file), str(out), "--workers", str(workers), "--json"])


def _timed(command: list[str]) -> Cost:
    with TemporaryFile("w+") as said:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, text=True)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            said.seek(0)
            raise BenchError(
                f"{command} ended with {process.returncode}: {said.read()[-2_000:]}", remedy="see above"
            )
        return Cost(time.perf_counter() - began, used.ru_utime + used.ru_stime)


def killed(settings_file: Path, out: Path, workers: int, after_s: float) -> bool:
    """Begin, or go on, and kill all processes after some seconds; return whether it had ended before."""
    command = [*_COMMAND, str(settings_file), str(out), "--workers", str(workers), "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        process.wait(after_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return False
    return True


def objects(folder: Path) -> dict[str, str]:
    """Return the hash of every object of an output, by name."""
    return {
        str(path.relative_to(folder)): blake2b(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def uncounted(out: Path, made: dict[str, list[int]]) -> list[str]:
    """Return the sources of which a document is missing, there twice, or counted in another way than it is stored."""
    statistics = json.loads((out / "statistics.json").read_text("utf-8"))
    kept, dropped = Counter[str](), Counter[tuple[str, str, str]]()
    ids: set[bytes] = set()
    for row in _rows(out / "documents", ["id", "source"]):
        kept[row["source"]] += 1
        ids.add(blake2b(row["id"].encode(), digest_size=12).digest())
    for row in _rows(out / "dropped", ["id", "source", "stage", "reason"]):
        dropped[row["source"], row["stage"], row["reason"]] += 1
        ids.add(blake2b(row["id"].encode(), digest_size=12).digest())
    wrong = [] if len(ids) == kept.total() + dropped.total() else ["ids"]
    for name, counts in statistics["sources"].items():
        told = {
            (name, stage, reason): n for stage, by in counts["dropped"].items() for reason, n in by.items()
        }
        there = {key: n for key, n in dropped.items() if key[0] == name}
        left = kept[name] + sum(there.values())
        told_right = told == there and counts["documents_kept"] == kept[name]
        if not told_right or not left == counts["documents_read"] == made[name][1]:
            wrong.append(name)
    return wrong


def _rows(folder: Path, columns: list[str]) -> Iterator[dict[str, str]]:
    for path in sorted(folder.glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(4096, columns=columns):
            yield from batch.to_pylist()


def filtered(out: Path, work: Path, most: int) -> tuple[tuple[Cost, int], tuple[Cost, int], int]:
    """Take a part of what was kept through datatrove's filters, ours and its own way; return costs and bytes."""
    part, size = work / "part.jsonl", 0
    with part.open("w", encoding="utf-8") as file:
        for row in _rows(out / "documents", ["id", "text"]):
            size += len(row["text"].encode())
            file.write(json.dumps(row) + "\n")
            if size >= most:
                break
    source = {"source": "part", "files": [str(part)], "fields": {"id": "id"}}
    path = work / "part.yaml"
    path.write_text(yaml.safe_dump({"inputs": [source], "stages": BLOCKS}))
    ours = prepared(path, work / "part-out", 1)
    kept = json.loads((work / "part-out/statistics.json").read_text("utf-8"))["documents_kept"]
    peer = _timed([sys.executable, "-c", _PEER, str(part), str(work / "peer")])
    theirs = sum(1 for file in (work / "peer/kept").glob("*.parquet") for _ in _rows_of(file))
    return (ours, kept), (peer, theirs), size


def _rows_of(path: Path) -> Iterator[object]:
    for batch in pq.ParquetFile(path).iter_batches(4096, columns=["id"]):
        yield from batch.to_pylist()


_PEER = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.filters import FineWebQualityFilter, GopherQualityFilter, GopherRepetitionFilter
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.writers import ParquetWriter
part, out = sys.argv[1:]
folder, _, name = part.rpartition("/")
LocalPipelineExecutor(
    pipeline=[
        JsonlReader(folder, glob_pattern=name, compression=None),
        GopherQualityFilter(), GopherRepetitionFilter(), FineWebQualityFilter(),
        ParquetWriter(out + "/kept"),
    ],
    tasks=1, workers=1, logging_dir=out + "/logs",
).run()
"""


def bench_prepare(inputs: Path, work: Path, kills: int, pause: float, seed: int, part: int) -> Found:
    """Run all of it. Raises BenchError: the inputs are not there, or a command failed."""
    if not (inputs / "made.json").exists():
        raise BenchError(f"{inputs} holds no inputs", remedy="make them with prepare_inputs.py")
    made = json.loads((inputs / "made.json").read_text("utf-8"))
    work.mkdir(parents=True)
    path = work / "prepare.yaml"
    path.write_text(yaml.safe_dump(settings(inputs, STAGES)))
    with ThreadPoolExecutor(1) as beside:
        undisturbed = beside.submit(prepared, path, work / "alone", 1)
        drawn, moments = random.Random(seed), list[float]()
        for _ in range(kills):
            moments.append(drawn.uniform(0.2, 2) * pause)
            ended = killed(path, work / "killed", 2, moments[-1])
            note(f"{'ended before' if ended else 'killed after'} {moments[-1]:.0f} s")
        moments.append(prepared(path, work / "killed", 2).wall_s)
        alone = undisturbed.result()
    equal = objects(work / "alone") == objects(work / "killed")
    note(f"same bytes: {equal}")
    wrong = uncounted(work / "alone", made)
    note(f"not accounted for: {wrong}")
    ours, peer, size = filtered(work / "alone", work, part)
    statistics = json.loads((work / "alone/statistics.json").read_text("utf-8"))
    return Found(statistics, alone, moments, equal, wrong, ours, peer, size)


def render(found: Found) -> str:
    """Tables for people."""
    read = found.statistics["text_bytes_read"]
    kills = ", ".join(f"{seconds:.0f}" for seconds in found.kills[:-1])
    counted = "yes" if not found.uncounted else f"NOT {found.uncounted}"
    lines = [
        f"{found.statistics['documents_read']:,} documents, {read / 1e6:.0f} MB of text.",
        f"One worker: {found.alone.wall_s:.0f} s, {read / 1e6 / found.alone.cpu_s:.2f} MB a CPU second.",
        f"Two workers: killed after {kills} s, then to the end in {found.kills[-1]:.0f} s.",
        f"The same bytes: {'yes' if found.equal else 'NO'}.",
        f"Documents in are documents out and dropped ones: {counted}.",
        "",
        "| source | read | kept | MB read | MB kept |",
        "|---|---|---|---|---|",
    ]
    for name, each in found.statistics["sources"].items():
        sizes = f"{each['text_bytes_read'] / 1e6:.0f} | {each['text_bytes_kept'] / 1e6:.0f}"
        lines.append(f"| {name} | {each['documents_read']:,} | {each['documents_kept']:,} | {sizes} |")
    lines += ["", "| stage | dropped | reasons |", "|---|---|---|"]
    for stage in found.statistics["stages"]:
        most = sorted(stage["dropped"].items(), key=lambda item: -item[1])[:4]
        shown = ", ".join(f"{reason} {count:,}" for reason, count in most)
        lines.append(f"| {stage['stage']} | {sum(stage['dropped'].values()):,} | {shown} |")
    lines += ["", f"{found.part_bytes / 1e6:.0f} MB through the same filters of datatrove:", ""]
    lines += ["| | MB a CPU second | wall s | kept |", "|---|---|---|---|"]
    for name, (cost, kept) in (("corpus prepare", found.ours), ("datatrove's pipeline", found.peer)):
        lines.append(f"| {name} | {found.part_bytes / 1e6 / cost.cpu_s:.2f} | {cost.wall_s:.0f} | {kept:,} |")
    return "\n".join(lines)


def main(
    inputs: Annotated[Path, typer.Argument(help="Folder that prepare_inputs.py made.")],
    work: Annotated[Path, typer.Argument(help="Folder to make.")],
    kills: Annotated[int, typer.Option(min=0)] = 5,
    pause: Annotated[float, typer.Option(help="Seconds until a kill, on average.")] = 60,
    seed: int = 0,
    part: Annotated[
        int, typer.Option(help="Bytes of text that go through datatrove's pipeline.")
    ] = 50_000_000,
) -> None:
    """Five kinds of text, five kills, the same bytes; and the cost beside datatrove's."""
    typer.echo(render(bench_prepare(inputs, work, kills, pause, seed, part)))


if __name__ == "__main__":
    run(main)
