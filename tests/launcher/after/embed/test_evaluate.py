"""Figures of vectors: equal to their formulas written out, and refused where they mean nothing."""

import math
import random
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import pearsonr, spearmanr

from launcher.after.embed.evaluate import CellSettings, FitSettings, embed_cell
from launcher.after.embed.model import load_model
from launcher.after.embed.settings import Encoding
from launcher.after.finetune.pretrained import LocalModel, open_pretrained
from launcher.after.tasks.examples import Retrieval, Sentences
from launcher.after.tasks.task import Task, load_task
from launcher.errors import TaskError
from tests.support.data.made_up import WORDS
from tests.support.models.exports import FAMILIES, export

STS = """name: sts
kind: similarity
published: here
files: {train: train.tsv, dev: dev.tsv}
format: tsv
fields: {first: 2, second: 3, label: 1}
score_range: [0, 5]
metrics: [spearman, pearson]
"""
BEIR = """name: find
kind: retrieval
published: here
files: {test: {corpus: corpus.jsonl, queries: queries.jsonl, qrels: qrels.tsv}}
format: beir
metrics: [ndcg@10, mrr@10, recall@100, map@100]
"""


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    folder = tmp_path_factory.mktemp("bert")
    export(FAMILIES["bert"], folder / "model")
    with open_pretrained(str(folder / "model")) as pretrained:
        return pretrained


def sts(folder: Path, seed: int = 1) -> Task:
    draw = random.Random(seed)
    for split in ("train", "dev"):
        lines = [
            f"{draw.uniform(0, 5):.3f}\t{' '.join(draw.choices(WORDS, k=4))}\t{' '.join(draw.choices(WORDS, k=6))}\n"
            for _ in range(24)
        ]
        (folder / f"{split}.tsv").write_text("".join(lines))
    (folder / "sts.yaml").write_text(STS)
    return load_task(str(folder / "sts.yaml"))


def test_similarity_is_the_correlation_of_the_cosine(bert: LocalModel, tmp_path: Path) -> None:
    task = sts(tmp_path)
    examples = task.read("dev")
    assert isinstance(examples, Sentences)
    assert examples.second is not None
    model = load_model(bert, Encoding(pooling="max"))
    first, second = (model.encode(list(texts)) for texts in (examples.first, examples.second))
    cosines = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    found = embed_cell(bert, task, CellSettings(pooling="max", batch=5), seed=1)
    assert list(found) == ["spearman", "pearson"]
    assert found["spearman"] == pytest.approx(spearmanr(cosines, examples.labels).statistic, abs=1e-3)
    assert found["pearson"] == pytest.approx(pearsonr(cosines, examples.labels).statistic, abs=1e-5)


def test_a_cell_trains_on_the_tasks_own_split(bert: LocalModel, tmp_path: Path) -> None:
    """A function of its arguments: twice the same, another seed another figure."""
    task = sts(tmp_path)
    settings = CellSettings(fit=FitSettings(epochs=1, lr=1e-3))
    first, again, other = (embed_cell(bert, task, settings, seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert first != embed_cell(bert, task, CellSettings(), seed=1)


def beir(folder: Path, draw: random.Random) -> tuple[Task, Mapping[str, set[str]]]:
    documents = {f"d{i}": " ".join(draw.choices(WORDS, k=8)) for i in range(30)}
    queries = {f"q{i}": " ".join(draw.choices(WORDS, k=4)) for i in range(6)}
    relevant = {name: set(draw.sample(sorted(documents), draw.randint(1, 14))) for name in queries}
    for name, texts in (("corpus", documents), ("queries", queries)):
        lines = [f'{{"_id": "{key}", "text": "{text}"}}\n' for key, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    lines = [f"{query}\t{document}\t1\n" for query in queries for document in sorted(relevant[query])]
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    (folder / "find.yaml").write_text(BEIR)
    return load_task(str(folder / "find.yaml")), relevant


@pytest.mark.parametrize("seed", range(3))
def test_retrieval_is_its_formulas(bert: LocalModel, tmp_path: Path, seed: int) -> None:
    task, relevant = beir(tmp_path, random.Random(seed))
    examples = task.read("test")
    assert isinstance(examples, Retrieval)
    model = load_model(bert, Encoding(normalize=True))
    queries = model.encode(list(examples.queries.values()))
    documents = model.encode(list(examples.documents.values()))
    names, gains, ranks, recalls = list(examples.documents), [], [], []
    for query, scores in zip(examples.queries, queries @ documents.T, strict=True):
        hits = [names[i] in relevant[query] for i in np.argsort(-scores)]
        ideal = sum(1 / math.log2(place + 2) for place in range(min(10, len(relevant[query]))))
        gains.append(sum(hit / math.log2(place + 2) for place, hit in enumerate(hits[:10])) / ideal)
        ranks.append(next((1 / (place + 1) for place, hit in enumerate(hits[:10]) if hit), 0.0))
        recalls.append(sum(hits[:100]) / len(relevant[query]))
    found = embed_cell(bert, task, CellSettings(), seed=1)
    assert found["ndcg@10"] == pytest.approx(np.mean(gains), abs=1e-6)
    assert found["mrr@10"] == pytest.approx(np.mean(ranks), abs=1e-6)
    assert found["recall@100"] == pytest.approx(np.mean(recalls), abs=1e-6)


def test_a_task_that_vectors_do_not_answer(bert: LocalModel, tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text("a rank\t0\n")
    (tmp_path / "class.yaml").write_text(
        "name: cls\nkind: classification\npublished: here\nfiles: {dev: dev.tsv}\nformat: tsv\n"
        "fields: {first: 1, label: 2}\nlabels: ['0', '1']\nmetrics: [accuracy]\n"
    )
    with pytest.raises(TaskError, match=r"\bkind\b.*\bvectors\b"):
        embed_cell(bert, load_task(str(tmp_path / "class.yaml")), CellSettings(), seed=1)


def test_scores_that_are_all_equal(bert: LocalModel, tmp_path: Path) -> None:
    task = sts(tmp_path)
    (tmp_path / "dev.tsv").write_text("3\ta rank\trows\n3\tloss\tfalls\n")
    with pytest.raises(TaskError, match=r"\bscores\b.*\b3\b"):
        embed_cell(bert, task, CellSettings(), seed=1)


def test_long_texts_are_cut_and_it_is_said(
    bert: LocalModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = sts(tmp_path)
    (tmp_path / "dev.tsv").write_text(f"3\ta rank\t{'rows ' * 100}\n1\tloss\tfalls\n")
    with caplog.at_level("WARNING"):
        embed_cell(bert, task, CellSettings(), seed=1)
    assert re.search(r"\b1 of 4 texts\b.*\b24 tokens\b", caplog.text)
