"""Which near copies of held-out documents are trained on: python tests/bench/heldout_leaks.py TEXT...

Pieces of the given text are one source. The other holds near copies of each, one of every kind. Both are prepared
together and built into a corpus each, the second with the held-out rule of the first. A near copy leaks if it is
trained on in either corpus while the document that it was made of is held out.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pyarrow.parquet as pq
import typer
from near_duplicates import BYTES, pieces
from program import BenchError, note, run
from variants import VARIANTS

from data_service.corpus.corpus import SPLITS, open_corpus
from data_service.corpus.provenance import ProvenanceOptions
from data_service.corpus.sidecar import read_origins
from data_service.ingest.build import build_corpus
from data_service.ingest.heldout import heldout_like
from data_service.ingest.options import BuildOptions
from data_service.prepare.configuration import Preparation
from data_service.prepare.prepare import prepare
from data_service.processes import temporary_folder
from data_service.tokenizers.load import save_tokenizer
from data_service.tokenizers.train import train_tokenizer
from launcher.app.cli.texts import sample_texts

WAYS: dict[str, list[dict[str, Any]]] = {
    "not prepared": [],
    "keep: first": [{"stage": "near_duplicates"}],
    "keep: all": [{"stage": "near_duplicates", "keep": "all"}],
}


@dataclass(frozen=True)
class Leaks:
    """What leaked. `held`: number of held-out documents; `by_kind`: of each kind the number of near copies of these
    that are trained on."""

    held: int
    by_kind: dict[str, int]


def bench_leaks(
    texts: Sequence[str], stages: Sequence[dict[str, Any]], *, fraction: float, seed: int = 0
) -> Leaks:
    """Prepare and build the texts and their near copies; return which are trained on though the text is held out.

    The last tenth of the texts is what is put beside others, and no document of its own.
    """
    drawn = random.Random(seed)
    count = len(texts) * 9 // 10
    copies = {
        f"{kind}:{number}": VARIANTS[kind](texts[number], texts[count + number % (len(texts) - count)], drawn)
        for number in range(count)
        for kind in VARIANTS
    }
    with temporary_folder("leaks") as folder:
        sources = {"first": {f"original:{n}": text for n, text in enumerate(texts[:count])}, "second": copies}
        _prepare(folder, sources, stages)
        trained, held = _build(folder, texts, fraction)
    originals = [name.partition(":")[2] for name in held if name.startswith("original:")]
    return Leaks(
        len(originals),
        {kind: sum(f"{kind}:{number}" in trained for number in originals) for kind in VARIANTS},
    )


def _prepare(folder: Path, sources: dict[str, dict[str, str]], stages: Sequence[dict[str, Any]]) -> None:
    inputs = []
    for source, documents in sources.items():
        path = folder / f"{source}.jsonl"
        lines = (json.dumps({"text": text, "id": name}) + "\n" for name, text in documents.items())
        path.write_text("".join(lines), "utf-8")
        inputs.append({"source": source, "files": [str(path)], "fields": {"id": "id"}})
    preparation = Preparation.model_validate({"inputs": inputs, "stages": stages})
    prepare(preparation, str(folder / "prepared"), 1, lambda _: None)


def _build(folder: Path, texts: Sequence[str], fraction: float) -> tuple[set[str], set[str]]:
    """Build a corpus of each source; return the ids of what is trained on and of what is held out in either."""
    save_tokenizer(train_tokenizer("byte_bpe", iter(texts[:200]), 2000), str(folder / "tokenizer"))
    parts = sorted((folder / "prepared/documents").iterdir())
    options = BuildOptions(heldout_fraction=fraction, provenance=ProvenanceOptions(id="id"))
    found: tuple[set[str], set[str]] = (set(), set())
    for source in ("first", "second"):
        own = [str(part) for part in parts if set(pq.read_table(part)["source"].to_pylist()) == {source}]
        build_corpus(own, str(folder / source), str(folder / "tokenizer"), options, lambda _: None)
        corpus = open_corpus(str(folder / source))
        options = options.model_copy(update=heldout_like(corpus.manifest))
        for ids, split in zip(found, SPLITS, strict=True):
            for shard in corpus.table(split).shards:
                ids.update(row.provenance.id or "" for row in read_origins(corpus, split, shard))
    return found


def render(found: dict[str, Leaks]) -> str:
    """A table for people."""
    lines = [f"| near copy | {' | '.join(found)} |", "|---|" + "---|" * len(found)]
    for kind in VARIANTS:
        cells = (f"{leaks.by_kind[kind] / max(1, leaks.held):.1%}" for leaks in found.values())
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    held = (f"{leaks.held:,}" for leaks in found.values())
    return "\n".join([*lines, f"| held-out documents | {' | '.join(held)} |"])


def main(
    texts: Annotated[list[str], typer.Argument(help="Files of text.")],
    documents: Annotated[int, typer.Option(min=100)] = 2_000,
    size: Annotated[int, typer.Option(min=50, help="Characters of a document.")] = 800,
    held: Annotated[int, typer.Option(min=10, help="Documents to hold out, about.")] = 65,
    words: Annotated[int, typer.Option(min=1, help="Units of a shingle.")] = 5,
    similarity: Annotated[float, typer.Option(help="Similarity from which on pairs are to be found.")] = 0.8,
) -> None:
    """Which near copies of held-out documents are trained on, without preparation and after each kind of it."""
    cut = list(pieces(sample_texts(texts, BuildOptions(), BYTES), size))
    if len(cut) < documents * 10 // 9:
        raise BenchError(f"{len(cut):,} pieces of text are too few", remedy=f"give {documents * 10 // 9:,}")
    random.Random(0).shuffle(cut)
    setting = {"words": words, "similarity": similarity}
    found = {}
    for way, stages in WAYS.items():
        note(f"{way} ...")
        chosen = [{**stage, **setting} for stage in stages]
        found[way] = bench_leaks(cut[: documents * 10 // 9], chosen, fraction=held / documents)
    typer.echo(render(found))


if __name__ == "__main__":
    run(main)
