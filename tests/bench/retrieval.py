"""What RetroMAE and Condenser are worth for retrieval on one text: python tests/bench/retrieval.py TEXT... --out DIR.

A small BERT is pretrained on masked tokens. From it three runs go on, for equally many tokens: on masked tokens alone,
with RetroMAE beside them, with Condenser beside them. Each of them, and fresh weights, then take the same short phase
of contrastive training on pairs: a document's title with a heading, and the paragraph below. Measured, before and after
each, is how well headings find their paragraphs among those of all documents that no run has read; beside it BM25.
"""

import hashlib
import json
import math
import multiprocessing
import re
import shutil
import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, NamedTuple

import compare
import typer
from program import note, run
from sections import Document, read_documents, sections, title_of
from train_alone import train_alone

from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions, PairFields
from launcher.after.embed.evaluate import CellSettings, measure_checkpoint_vectors
from launcher.after.export.sentence_transformer import Pooling
from launcher.after.finetune.pretrained import open_pretrained
from launcher.after.tasks.task import load_task
from launcher.app.cli.options import InputsArgument
from launcher.runtime.recipe.load import load, reload
from launcher.runtime.recipe.schema import Recipe
from launcher.runtime.recipe.tiny import tiny
from launcher.runtime.run.create import create_run

BASE, FRESH = "masked tokens", "fresh weights"
WAYS: Mapping[str, Mapping[str, object]] = {
    "masked tokens, more": {},
    "RetroMAE": {"retromae": {}},
    "Condenser": {"condenser": {}},
}
_POOLINGS: tuple[Pooling, ...] = ("cls", "mean")
_TRAINED: tuple[Pooling, ...] = ("cls",)  # by pairs
_LENGTH, _ROWS, _PAIRS = 64, 16, 32  # tokens of a row and of a text; rows and pairs of a batch
_WORDS = 50  # of a paragraph: about as many tokens as are read of it
_MEASURED = 20  # one document in so many
_HELDOUT, _TEXT_HELDOUT = 0.02, 0.05  # shares of pairs and of documents
_WORD = re.compile(r"\w+")
_TASK = """name: headings
kind: retrieval
published: made of the text by tests/bench/retrieval.py
files: {test: {corpus: corpus.jsonl, queries: queries.jsonl, qrels: qrels.tsv}}
format: beir
metrics: [ndcg@10]
"""


class Pair(NamedTuple):
    """A title with a heading, and the beginning of the first paragraph below."""

    query: str
    text: str


class Trial(NamedTuple):
    """A run: BASE, one of WAYS, or, with `pairs`, the contrastive phase after one of WAYS or of FRESH."""

    way: str
    pairs: bool
    seed: int

    @property
    def name(self) -> str:
        return f"{self.way.replace(', ', '-').replace(' ', '-')}{'-pairs' if self.pairs else ''}-{self.seed}"

    @property
    def start(self) -> "Trial | None":
        if self.way in (BASE, FRESH):
            return None
        return Trial(self.way if self.pairs else BASE, False, self.seed)


def trials(seed: int) -> Iterator[Trial]:
    """Yield all runs of a seed, each after the one that it starts from."""
    yield from (Trial(way, False, seed) for way in (BASE, *WAYS))
    yield from (Trial(way, True, seed) for way in (FRESH, *WAYS))


@dataclass(frozen=True)
class Bench:
    """Where it lies, and the steps of BASE, of one of WAYS, and of a contrastive phase."""

    root: Path
    steps: tuple[int, int, int]

    def place(self, trial: Trial) -> Path:
        return self.root / "runs" / "-".join(map(str, self.steps)) / trial.name


@dataclass(frozen=True)
class Measured:
    """nDCG@10, from 0 to 1, by pooling, and CPU seconds of the training."""

    way: str
    pairs: bool
    seed: int
    cpu_seconds: float
    ndcg: dict[str, float]


def pairs_of(documents: Iterable[Document]) -> Iterator[Pair]:
    """Yield the pairs of sections that begin with prose; of several with one query, or with one text (a licence), the
    first."""
    seen: set[str] = set()
    for document in documents:
        for section in sections(document):
            if not section.paragraphs:
                continue
            text = " ".join(section.paragraphs[0].split()[:_WORDS])
            pair = Pair(f"{title_of(document)}: {section.title}", text)
            if seen.isdisjoint(pair):
                seen.update(pair)
                yield pair


def is_measured(document: Document) -> bool:
    return int(hashlib.sha256(document.name.encode()).hexdigest(), 16) % _MEASURED == 0


def write_texts(documents: Sequence[Document], root: Path) -> list[Pair]:
    """Write `text.jsonl` (documents to pretrain on), `pairs.jsonl` (of the same) and the folder `task`, of the others,
    whose pairs are returned."""
    trained = [document for document in documents if not is_measured(document)]
    measured = list(pairs_of(document for document in documents if is_measured(document)))
    (root / "task").mkdir(parents=True, exist_ok=True)
    _lines(root / "text.jsonl", ({"text": document.text} for document in trained))
    _lines(root / "pairs.jsonl", ({"query": pair.query, "positive": pair.text} for pair in pairs_of(trained)))
    texts = {"corpus": [pair.text for pair in measured], "queries": [pair.query for pair in measured]}
    for name, own in texts.items():
        _lines(root / f"task/{name}.jsonl", ({"_id": str(i), "text": text} for i, text in enumerate(own)))
    judged = "".join(f"{i}\t{i}\t1\n" for i in range(len(measured)))
    (root / "task/qrels.tsv").write_text(f"query-id\tcorpus-id\tscore\n{judged}", "utf-8")
    (root / "task/headings.yaml").write_text(_TASK, "utf-8")
    return measured


def _lines(path: Path, records: Iterable[Mapping[str, str]]) -> None:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), "utf-8")


def bm25(pairs: Sequence[Pair]) -> float:
    """Return nDCG@10 of BM25 (Robertson and Zaragoza 2009, k1 = 1.2, b = 0.75), where each query has its own text. Of
    equal scores the right one counts as the last."""
    counts = [Counter(_WORD.findall(pair.text.lower())) for pair in pairs]
    lengths = [count.total() for count in counts]
    mean = statistics.mean(lengths)
    postings: dict[str, dict[int, float]] = defaultdict(dict)
    for index, count in enumerate(counts):
        for word, times in count.items():
            postings[word][index] = times * 2.2 / (times + 1.2 * (0.25 + 0.75 * lengths[index] / mean))
    gains = []
    for index, pair in enumerate(pairs):
        scores: dict[int, float] = defaultdict(float)
        for word in set(_WORD.findall(pair.query.lower())):
            found = postings.get(word, {})
            rarity = math.log(1 + (len(pairs) - len(found) + 0.5) / (len(found) + 0.5))
            for other, weight in found.items():
                scores[other] += rarity * weight
        own = scores.pop(index, 0.0)
        before = sum(score >= own for score in scores.values())
        gains.append(1 / math.log2(before + 2) if own and before < 10 else 0.0)
    return statistics.mean(gains)


def recipe_of(trial: Trial, bench: Bench) -> Recipe:
    """Return the recipe of a run. Runs of a stage and a seed read the same batches, other stages other ones."""
    stage = 2 if trial.pairs else int(trial.way != BASE)
    steps, rows = bench.steps[stage], _PAIRS if trial.pairs else _ROWS
    text = tiny(load("bert-base"))
    settings: dict[str, object] = {
        "seed": 3 * trial.seed + stage,
        "start": "scratch" if trial.start is None else str(bench.place(trial.start)),
        "corpus": {
            "sources": {"text": {"uri": f"{bench.root}/{'pairs' if trial.pairs else 'wordpiece/corpus'}"}},
            "heldout": {"fraction": _HELDOUT if trial.pairs else _TEXT_HELDOUT},
        },
        "tokenizer.uri": f"{bench.root}/wordpiece/tokenizer",
        "model": text.model.model_dump(mode="json") | {"max_length": _LENGTH},
        "phases": [{"steps": steps, "length": _LENGTH, "batch": {"sequences": rows}}],
        "microbatch": rows,
        "schedule": {"warmup": steps // 10, "decay": "linear"},
        "checkpoint": {"every": {"steps": steps}, "keep_last": 1},
        "evaluation": {"every": {"steps": steps}, "samples": 256},
        "logging": {"flush_seconds": 1000.0, "tensorboard": False},
    }
    if trial.pairs:
        settings["objective"] = {"contrastive": {"temperature": 0.05, "pooling": "cls"}}
    else:
        settings["input"] = {"packing": "full_sentences"}
        settings["objective"] = {"mlm": {"rate": 0.3}, **WAYS.get(trial.way, {})}
    before = tiny(load("contrastive-base")) if trial.pairs else text
    return reload(before, tuple(f"{key}={json.dumps(value)}" for key, value in settings.items()))


def measure(trial: Trial, bench: Bench, pool: Executor) -> Measured:
    """Train in a process of `pool`, and measure; or return what was found before."""
    place = bench.place(trial)
    kept = place.with_name(f"{place.name}.json")
    if not kept.exists():
        shutil.rmtree(place, ignore_errors=True)  # of a bench that was interrupted
        seconds = pool.submit(_train, trial, bench).result()
        task = load_task(f"{bench.root}/task/headings.yaml")
        with open_pretrained(str(place)) as model:
            ndcg: dict[str, float] = {
                pooling: measure_checkpoint_vectors(
                    model, task, CellSettings(pooling=pooling, max_length=_LENGTH, batch=64)
                )["ndcg@10"]
                for pooling in (_TRAINED if trial.pairs else _POOLINGS)
            }
        found = Measured(*trial, seconds, ndcg)
        kept.write_text(json.dumps(asdict(found), indent=1))
    return Measured(**json.loads(kept.read_text()))


def _train(trial: Trial, bench: Bench) -> float:
    made = create_run(recipe_of(trial, bench), str(bench.place(trial)), datetime.now(UTC))
    return train_alone(made).cpu_seconds


def render(found: Sequence[Measured], words: float) -> str:
    """Return a table in Markdown: nDCG@10 times 100, means over the seeds, in brackets the smallest and the largest.
    `words`: that of BM25."""
    lines = [
        "| pretrained on | CPU s | mean | first token | first token, after pairs |",
        "|---|--:|---|---|---|",
    ]
    for way in (BASE, *WAYS, FRESH):
        before, after = (
            [one for one in found if (one.way, one.pairs) == (way, pairs)] for pairs in (False, True)
        )
        seconds = f"{statistics.mean(one.cpu_seconds for one in before):.0f}" if before else "-"
        chosen = ((before, "mean"), (before, "cls"), (after, "cls"))
        cells = [[one.ndcg[pooling] for one in those] for those, pooling in chosen]
        lines.append(f"| {way} | {seconds} | {' | '.join(map(_spelt, cells))} |")
    return "\n".join([*lines, "", f"BM25: {100 * words:.1f}."])


def _spelt(values: Sequence[float]) -> str:
    if not values:
        return "-"
    low, high = (f"{100 * value:.1f}" for value in (min(values), max(values)))
    return f"{100 * statistics.mean(values):.1f} ({low} to {high})"


def prepare(texts: Sequence[str], root: Path, vocabulary: int) -> list[Pair]:
    """Make the tokenizer, the corpora of text and pairs, and the task, whose pairs are returned. What is there
    stays."""
    measured = write_texts(list(read_documents(map(Path, texts))), root)
    compare.prepare([f"{root}/text.jsonl"], root, vocabulary, "wordpiece", _TEXT_HELDOUT)
    options = BuildOptions(pairs=PairFields(), heldout_fraction=_HELDOUT)
    tokenizer = f"{root}/wordpiece/tokenizer"
    build_corpus([f"{root}/pairs.jsonl"], f"{root}/pairs", tokenizer, options, lambda progress: None)
    return measured


def main(
    texts: InputsArgument,
    out: Annotated[
        Path, typer.Option(help="Folder for corpora, runs and results; an interrupted bench goes on.")
    ],
    seeds: Annotated[int, typer.Option(min=1, help="Of every run.")] = 3,
    base_steps: Annotated[int, typer.Option(min=10, help="Of the first run, 1,024 tokens each.")] = 1000,
    steps: Annotated[int, typer.Option(min=10, help="Of each run that goes on from it.")] = 500,
    pair_steps: Annotated[int, typer.Option(min=10, help="Of a contrastive phase, 32 pairs each.")] = 100,
    vocabulary: Annotated[int, typer.Option(min=500, help="Ids of the tokenizer.")] = 4096,
) -> None:
    """Retrieval before and after pretraining with RetroMAE and Condenser, and after a contrastive phase."""
    bench = Bench(out.absolute(), (base_steps, steps, pair_steps))
    pairs = prepare(texts, bench.root, vocabulary)
    note(f"{len(pairs):,} headings and paragraphs")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["launcher.runtime.rank.main"])  # imported once for all runs
    found = []
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        for trial in (trial for seed in range(1, seeds + 1) for trial in trials(seed)):
            found.append(measure(trial, bench, pool))
            note(f"{trial.name}: {100 * found[-1].ndcg['cls']:.1f}, {found[-1].cpu_seconds:.0f} CPU s")
    typer.echo(render(found, bm25(pairs)))


if __name__ == "__main__":
    run(main)
