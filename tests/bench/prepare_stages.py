"""What each stage of `corpus prepare` costs: python tests/bench/prepare_stages.py TEXT... [--old TREE]

Pieces of the given text, about as long as web pages, go through each stage by itself, through all of them as documents
do (what a stage drops is not seen by the next), and through the whole command with one worker. CPU seconds of one
core, each measurement in a process of its own. With `--old`, another checkout takes turns with this one, and what both
decided is compared: documents kept and dropped, reasons, texts, signatures, statistics.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
import yaml
from program import BenchError, note, run

from data_service.ingest.options import BuildOptions
from data_service.processes import temporary_folder
from launcher.app.cli.texts import sample_texts

FILTERS = ("gopher_quality", "gopher_repetition", "c4_quality", "fineweb_quality")
NEAR = "near_duplicates"
CHAIN, COMMAND = "all stages", "corpus prepare"
_TREE = Path(__file__).parents[2]


@dataclass(frozen=True)
class Side:
    """What one checkout needed. `cpu_s`: by measurement; `digests`: of what it decided; `peak_mb`: of the command."""

    cpu_s: dict[str, float]
    digests: dict[str, str]
    peak_mb: float


def measure(documents: Path) -> dict[str, Any]:
    """Return CPU seconds and the digest of all decisions by stage, with the modules of this process."""
    from pydantic import TypeAdapter

    from data_service.prepare.documents import Document
    from data_service.prepare.stages import Stage, open_filter

    texts = [json.loads(line)["text"] for line in documents.open(encoding="utf-8")]
    adapter: TypeAdapter[Any] = TypeAdapter(Stage)
    filters = {name: open_filter(adapter.validate_python({"stage": name})) for name in FILTERS}
    cpu_s, digests = {}, {}
    for name in (CHAIN, *FILTERS, NEAR):  # the chain meets words that nothing has met before
        chosen = list(FILTERS) if name == CHAIN else [name] if name in filters else []
        sign = _signing() if name in (NEAR, CHAIN) else None
        digest, began = blake2b(), time.process_time()
        for number, text in enumerate(texts):
            decided: Any = Document(str(number), text, "bench")
            for each in chosen:
                decided = filters[each](decided)
                if not isinstance(decided, Document):
                    break
            else:
                if sign:
                    sign[0](decided.text, decided.id)
            digest.update(repr(decided).encode())
        digest.update(sign[1]() if sign else b"")
        cpu_s[name], digests[name] = time.process_time() - began, digest.hexdigest()
    return {"cpu_s": cpu_s, "digests": digests}


def _signing() -> tuple[Callable[[str, str], None], Callable[[], bytes]]:
    """Return the function that takes a document in, and the one that stores all signatures and returns their digest."""
    from data_service.prepare.minhash import choose_bands
    from data_service.prepare.signatures import SignatureCollector
    from data_service.store.open import open_store

    signatures = SignatureCollector(5, choose_bands(0.8))

    def stored() -> bytes:
        with temporary_folder("signatures") as folder:
            return signatures.store(open_store(str(folder)), "all").digest.encode()

    return signatures.add, stored


def side(tree: Path, documents: Path, work: Path) -> Side:
    """Measure one checkout. Raises BenchError: a process failed."""
    found: dict[str, Any] = {}

    def measured() -> None:
        found.update(json.loads(_finished([sys.executable, __file__, str(documents), "--alone"], tree)[0]))

    measured()
    settings = work / "prepare.yaml"
    source = {"source": "bench", "files": [str(documents)], "fields": {"id": "id"}}
    stages = [{"stage": name} for name in (*FILTERS, NEAR)]
    settings.write_text(yaml.safe_dump({"inputs": [source], "stages": stages}))
    out = work / "out"
    command = [sys.executable, "-m", "maskfleet", "corpus", "prepare", str(settings), str(out), "--json"]
    _, used = _finished([*command, "--workers", "1"], tree)
    digest = blake2b(json.dumps(json.loads((out / "statistics.json").read_text("utf-8"))).encode())
    subprocess.run(["rm", "-r", str(out)], check=True)
    cpu_s = found["cpu_s"] | {COMMAND: used.ru_utime + used.ru_stime}
    return Side(cpu_s, found["digests"] | {COMMAND: digest.hexdigest()}, used.ru_maxrss / 1e3)


def _finished(command: list[str], tree: Path) -> tuple[str, Any]:
    paths = f"{tree}:{tree / 'launcher'}:{Path(__file__).parent}"
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise BenchError(f"{command} in {tree} ended with {process.returncode}", remedy="see above")
    return said, used


def render(documents: int, size: int, now: Sequence[Side], old: Sequence[Side]) -> str:
    """A table for people; with two sides, medians, and ratios of pairs."""
    text_mb = size / 1e6
    lines = [
        f"{documents:,} documents, {text_mb:.1f} MB; peak of the command {max(one.peak_mb for one in now):.0f} MB"
        + (f", before {max(one.peak_mb for one in old):.0f} MB" if old else ""),
        "",
        "| | documents a CPU second | MB a CPU second |" + (" before | ratio | same |" if old else ""),
        "|---|---|---|" + ("---|---|---|" if old else ""),
    ]
    for name in now[0].cpu_s:
        seconds = median(one.cpu_s[name] for one in now)
        line = f"| {name} | {documents / seconds:,.0f} | {text_mb / seconds:.2f} |"
        if old:
            before = median(one.cpu_s[name] for one in old)
            ratio = median(b.cpu_s[name] / a.cpu_s[name] for a, b in zip(now, old, strict=True))
            same = len({one.digests[name] for one in (*now, *old)}) == 1
            line += f" {text_mb / before:.2f} | {ratio:.1f} x | {'yes' if same else 'NO'} |"
        lines.append(line)
    return "\n".join(lines)


def pieces(texts: Iterable[str], size: int) -> Iterator[str]:
    """Yield runs of paragraphs of at least `size` characters."""
    for text in texts:
        held: list[str] = []
        for paragraph in text.split("\n\n"):
            held.append(paragraph)
            if sum(map(len, held)) >= size:
                yield "\n\n".join(held)
                held = []


def main(
    texts: Annotated[list[str], typer.Argument(help="Files of text, as of `corpus build`.")],
    old: Annotated[Path | None, typer.Option(help="Another checkout, which takes turns with this one.")] = None,
    pairs: Annotated[int, typer.Option(min=1)] = 3,
    size: Annotated[int, typer.Option(help="Characters of a document, at least.")] = 3_000,
    most: Annotated[int, typer.Option(help="Bytes of text.")] = 20_000_000,
    alone: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Documents and megabytes a CPU second by stage."""
    if alone:
        typer.echo(json.dumps(measure(Path(texts[0]))))
        return
    with temporary_folder("prepare-stages") as work:
        path, taken, count = work / "documents.jsonl", 0, 0
        with path.open("w", encoding="utf-8") as file:
            for piece in pieces(sample_texts(texts, BuildOptions(), most), size):
                file.write(json.dumps({"id": str(count), "text": piece}) + "\n")
                taken, count = taken + len(piece.encode()), count + 1
        sides: tuple[list[Side], list[Side]] = ([], [])
        for number in range(pairs):
            for tree, measured in ((_TREE, sides[0]), (old, sides[1])):
                if tree is not None:
                    measured.append(side(tree, path, work))
                    note(f"{number + 1} of {pairs}: {tree}: {measured[-1].cpu_s}")
        typer.echo(render(count, taken, *sides))


if __name__ == "__main__":
    run(main)
