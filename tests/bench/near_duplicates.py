"""What `near_duplicates` finds, against all pairs: python tests/bench/near_duplicates.py TEXT...

Pieces of the given text become documents. Near copies of some are planted beside them in a second source. The Jaccard
similarity of all pairs is counted exactly, by shingles of words that are cut here, not by the code that is measured.
"""

import json
import random
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import pyarrow.parquet as pq
import typer
from numpy.typing import NDArray
from program import BenchError, note, run
from variants import VARIANTS

from data_service.ingest.options import BuildOptions
from data_service.prepare.configuration import Preparation
from data_service.prepare.prepare import prepare
from data_service.processes import temporary_folder
from launcher.app.cli.texts import sample_texts

BYTES = 1 << 27  # of text that documents are cut from
_WORD = re.compile(r"\w+")
_ORIGINAL = "original"
_STEPS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5, 0.4, 0.3)


@dataclass(frozen=True)
class Planted:
    """A document. `kind`: how it was made; `origin`: number of the document that it was made of, its own otherwise."""

    text: str
    kind: str
    origin: int


@dataclass(frozen=True)
class Found:
    """What was found.

    Attributes:
        pairs: for each step of similarity, number of pairs from it to the next higher, and of those found.
        same_cluster: similarities of pairs in one cluster: all of them, or 100,000 drawn ones.
        dropped: similarity of each dropped document to the one that stays.
        by_kind: of each kind of planted document: the number, how many were dropped, the mean similarity to its origin.
        seconds: of the preparation.
    """

    pairs: dict[float, tuple[int, int]]
    same_cluster: list[float]
    dropped: list[float]
    by_kind: dict[str, tuple[int, int, float]]
    documents: int
    text_bytes: int
    seconds: float

    def recall(self, similarity: float) -> float:
        """Return the share of all pairs of at least this similarity that are in one cluster."""
        counts = [counts for step, counts in self.pairs.items() if step >= similarity]
        return sum(found for _, found in counts) / max(1, sum(count for count, _ in counts))


def plant(texts: Sequence[str], count: int, size: int, seed: int = 0) -> list[Planted]:
    """Return `count` documents of about `size` characters, two of five of them near copies of others.

    Raises:
        BenchError: there is not enough text.
    """
    drawn = random.Random(seed)
    cut = list(pieces(texts, size))
    drawn.shuffle(cut)
    originals = count * 3 // 5
    if len(cut) < originals + originals // 2:
        raise BenchError(
            f"{len(cut):,} pieces of text are too few", remedy=f"give {originals + originals // 2:,}"
        )
    planted = [Planted(piece, _ORIGINAL, number) for number, piece in enumerate(cut[:originals])]
    kinds = list(VARIANTS)
    for number in range(count - originals):
        origin, kind = number // 2 % originals, kinds[number % len(kinds)]
        other = cut[originals + number % (len(cut) - originals)]
        planted.append(Planted(VARIANTS[kind](cut[origin], other, drawn), kind, origin))
    return planted


def pieces(texts: Iterable[str], size: int) -> Iterator[str]:
    """Yield runs of paragraphs of at least `size` characters."""
    for text in texts:
        held: list[str] = []
        for paragraph in text.split("\n\n"):
            held.append(paragraph)
            if sum(map(len, held)) >= size:
                yield "\n\n".join(held)
                held = []


def bench_near(
    planted: Sequence[Planted], stage: dict[str, Any], workers: int, progress: Callable[[str], None] = print
) -> Found:
    """Prepare the documents, and compare what was found with all pairs."""
    words = int(stage.get("words", 5))
    cut = [_shingles(each.text, words) for each in planted]
    clusters, dropped, seconds = _prepared(planted, stage, workers)
    progress(f"prepared in {seconds:.1f} s; counting all pairs")
    pairs = dict.fromkeys(_STEPS, (0, 0))
    for one, others, similarities in _all_pairs(cut):
        for other, similarity in zip(others.tolist(), similarities.tolist(), strict=True):
            step = next(step for step in _STEPS if similarity >= step)
            count, found = pairs[step]
            pairs[step] = (count + 1, found + (clusters[one] == clusters[other]))
    by_kind = {}
    for kind in VARIANTS:
        numbers = [number for number, each in enumerate(planted) if each.kind == kind]
        similar = [_jaccard(cut[number], cut[planted[number].origin]) for number in numbers]
        by_kind[kind] = (len(numbers), sum(n in dropped for n in numbers), float(np.mean(similar)))
    return Found(
        pairs,
        _within(cut, clusters),
        [_jaccard(cut[number], cut[stays]) for number, stays in dropped.items()],
        by_kind,
        len(planted),
        sum(len(each.text.encode()) for each in planted),
        seconds,
    )


def _prepared(
    planted: Sequence[Planted], stage: dict[str, Any], workers: int
) -> tuple[list[int], dict[int, int], float]:
    """Return the cluster of each document, of each dropped one the document that stays, and the seconds it took."""
    with temporary_folder("near-duplicates") as folder:
        inputs = []
        for source, originals in (("first", True), ("second", False)):
            path = folder / f"{source}.jsonl"
            with path.open("w", encoding="utf-8") as file:
                for number, each in enumerate(planted):
                    if (each.kind == _ORIGINAL) == originals:
                        file.write(json.dumps({"text": each.text, "id": number}) + "\n")
            inputs.append({"source": source, "files": [str(path)], "fields": {"id": "id"}})
        preparation = Preparation.model_validate(
            {"inputs": inputs, "stages": [{"stage": "near_duplicates", **stage}]}
        )
        began = time.perf_counter()
        prepare(preparation, str(folder / "out"), workers, lambda _: None)
        seconds = time.perf_counter() - began
        rows = pq.read_table(folder / "out/dropped").to_pylist() if (folder / "out/dropped").exists() else []
    dropped = {int(row["id"]): int(row["detail"].rpartition(" ")[2]) for row in rows}
    return [dropped.get(number, number) for number in range(len(planted))], dropped, seconds


def _shingles(text: str, words: int) -> NDArray[np.int64]:
    """Return the different shingles of a text, as hashes of tuples of words."""
    found = _WORD.findall(text.casefold())
    span = min(words, len(found))
    runs = zip(*(found[start : len(found) - span + 1 + start] for start in range(span)), strict=True)
    return np.unique(np.fromiter(map(hash, runs), dtype=np.int64))


def _jaccard(one: NDArray[np.int64], other: NDArray[np.int64]) -> float:
    both = len(np.intersect1d(one, other, assume_unique=True))
    return both / max(1, len(one) + len(other) - both)


def _all_pairs(
    cut: Sequence[NDArray[np.int64]],
) -> Iterator[tuple[int, NDArray[np.int64], NDArray[np.float64]]]:
    """Yield (document, later documents, their similarities) of all pairs of at least the lowest step."""
    sizes = np.array([len(part) for part in cut])
    owners = np.repeat(np.arange(len(cut)), sizes)
    _, names = np.unique(np.concatenate(cut), return_inverse=True)
    order = np.argsort(names, kind="stable")
    starts = np.searchsorted(names[order], np.arange(names.max() + 2))
    owners_of = owners[order]
    edges = np.concatenate(([0], np.cumsum(sizes)))
    for one in range(len(cut)):
        mine = names[edges[one] : edges[one + 1]]
        lists = [owners_of[starts[name] : starts[name + 1]] for name in mine.tolist()]
        if not lists:
            continue
        others, both = np.unique(np.concatenate(lists), return_counts=True)
        others, both = others[others > one], both[others > one]
        similar = both / (sizes[one] + sizes[others] - both)
        enough = similar >= _STEPS[-1]
        yield one, others[enough], similar[enough]


def _within(cut: Sequence[NDArray[np.int64]], clusters: Sequence[int]) -> list[float]:
    members: dict[int, list[int]] = {}
    for number, cluster in enumerate(clusters):
        members.setdefault(cluster, []).append(number)
    pairs = [(a, b) for each in members.values() for i, a in enumerate(each) for b in each[i + 1 :]]
    chosen = random.Random(0).sample(pairs, min(len(pairs), 100_000))
    return [_jaccard(cut[a], cut[b]) for a, b in chosen]


def render(found: Found) -> str:
    """A few tables for people."""
    lines = [
        f"{found.documents:,} documents, {found.text_bytes / 1e6:.0f} MB, in {found.seconds:.1f} s",
        "",
        "| pairs of similarity | number | found |",
        "|---|---|---|",
    ]
    for step, (count, hit) in found.pairs.items():
        lines.append(f"| from {step} | {count:,} | {hit / max(1, count):.1%} |")
    lines.append(f"| **0.8 and above** | | **{found.recall(0.8):.2%}** |")
    lines += [
        "",
        "| of | number | J >= 0.8 | >= 0.7 | >= 0.6 | >= 0.5 | < 0.5 |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, values in (
        ("pairs in one cluster", found.same_cluster),
        ("dropped, and what stays", found.dropped),
    ):
        shares = [
            sum(value >= step for value in values) / max(1, len(values)) for step in (0.8, 0.7, 0.6, 0.5)
        ]
        cells = " | ".join(f"{share:.1%}" for share in [*shares, 1 - shares[-1]])
        lines.append(f"| {title} | {len(values):,} | {cells} |")
    lines += ["", "| planted | number | mean similarity | dropped |", "|---|---|---|---|"]
    for kind, (count, gone, mean) in found.by_kind.items():
        lines.append(f"| {kind} | {count:,} | {mean:.2f} | {gone / max(1, count):.1%} |")
    return "\n".join(lines)


def main(
    texts: Annotated[list[str], typer.Argument(help="Files of text.")],
    documents: Annotated[int, typer.Option(min=100)] = 20_000,
    size: Annotated[int, typer.Option(min=50, help="Characters of a document.")] = 800,
    words: Annotated[int, typer.Option(min=1, help="Units of a shingle.")] = 5,
    similarity: Annotated[float, typer.Option(help="Similarity from which on pairs are to be found.")] = 0.8,
    workers: Annotated[int, typer.Option(min=1)] = 1,
) -> None:
    """Precision and recall of `near_duplicates` against all pairs, on planted near copies."""
    planted = plant(list(sample_texts(texts, BuildOptions(), BYTES)), documents, size)
    stage = {"words": words, "similarity": similarity}
    typer.echo(render(bench_near(planted, stage, workers, note)))


if __name__ == "__main__":
    run(main)
