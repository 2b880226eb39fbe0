"""Figures of vectors: equal to their formulas written out, and refused where they mean nothing."""

import math
import random
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr
from torch import nn

from launcher.after.embed import evaluate
from launcher.after.embed.evaluate import VectorMeasureSettings, measure_checkpoint_vectors, score_ranking
from launcher.after.embed.model import load_model
from launcher.after.embed.settings import EncodingSettings
from launcher.after.finetune.pretrained import LocalModel
from launcher.after.tasks.examples import Retrieval, Sentences
from launcher.after.tasks.task import Task, load_task
from launcher.errors import TaskError
from tests.support.data.made_up import WORDS
from tests.support.tasks.small_tasks import Models

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
def bert(models: Models) -> LocalModel:
    return models("bert", 24)


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
    model = load_model(bert, EncodingSettings(pooling="max"))
    first, second = (model.encode(list(texts)) for texts in (examples.first, examples.second))
    cosines = (first * second).sum(1) / np.linalg.norm(first, axis=1) / np.linalg.norm(second, axis=1)
    found = measure_checkpoint_vectors(bert, task, VectorMeasureSettings(pooling="max", batch=5))
    assert list(found) == ["spearman", "pearson"]
    assert found["spearman"] == pytest.approx(spearmanr(cosines, examples.labels).statistic, abs=1e-3)
    assert found["pearson"] == pytest.approx(pearsonr(cosines, examples.labels).statistic, abs=1e-5)


def beir(folder: Path, draw: random.Random) -> tuple[Task, dict[str, dict[str, int]]]:
    """Documents of which some are a query itself, by its id, and judgements of grades 0 to 3."""
    documents = {f"d{i}": " ".join(draw.choices(WORDS, k=8)) for i in range(120)}
    queries = {f"q{i}": " ".join(draw.choices(WORDS, k=4)) for i in range(6)}
    grades = {
        name: {key: draw.randint(0, 3) for key in draw.sample(sorted(documents), draw.randint(1, 118))}
        for name in queries
    }
    grades["q5"] = dict.fromkeys(grades["q5"], 0)  # nothing answers it
    documents |= {name: queries[name] for name in ("q0", "q1", "q2")}  # as in ArguAna
    for name, texts in (("corpus", documents), ("queries", queries)):
        lines = [f'{{"_id": "{key}", "text": "{text}"}}\n' for key, text in texts.items()]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    lines = [f"{query}\t{key}\t{grade}\n" for query in queries for key, grade in grades[query].items()]
    (folder / "qrels.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))
    (folder / "find.yaml").write_text(BEIR)
    return load_task(str(folder / "find.yaml")), grades


def test_retrieval_is_beirs(bert: LocalModel, tmp_path: Path) -> None:
    """The run that BEIR would give trec_eval: every document's cosine, but of the one with the query's id."""
    task, grades = beir(tmp_path, random.Random(0))
    examples = task.read("test")
    assert isinstance(examples, Retrieval)
    model = load_model(bert, EncodingSettings(normalize=True))
    queries, documents = (
        dict(zip(texts, model.encode(list(texts.values())), strict=True))
        for texts in (examples.queries, examples.documents)
    )
    run = {
        query: {name: float(vector @ other) for name, other in documents.items() if name != query}
        for query, vector in queries.items()
    }
    expected = [by_trec_eval(grades[query], run[query]) for query in grades]
    found = measure_checkpoint_vectors(bert, task, VectorMeasureSettings())
    assert list(found) == task.metrics
    for metric, value in found.items():
        assert value == pytest.approx(np.mean([one[metric] for one in expected]), abs=2e-6), metric


class Coarse(nn.Module):
    """Vectors of a few whole numbers each: a text is its vector, and many cosines are equal."""

    prompts: Mapping[str, str] = {}

    def encode(self, texts: list[str], **_: object) -> np.ndarray:
        return np.array([[int(number) for number in text.split()] for text in texts], np.float32)


VECTORS = st.lists(st.integers(-1, 1), min_size=2, max_size=2).map(lambda pair: f"{pair[0]} {pair[1]}")


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(st.integers(0, 9).map(str), VECTORS, min_size=1, max_size=4),
    st.dictionaries(st.integers(0, 300).map(str), VECTORS, min_size=1, max_size=200),
    st.sampled_from([7, 50_000]),
    st.randoms(use_true_random=False),
)
def test_ties_and_the_querys_own_document_are_ranked_as_trec_eval_ranks_them(
    queries: dict[str, str], documents: dict[str, str], chunk: int, draw: random.Random
) -> None:
    grades = {query: {name: draw.randint(0, 3) for name in documents if draw.random() < 0.3} for query in queries}
    relevant = {query: relevant_of(found) for query, found in grades.items()}
    vectors = {text: np.array(text.split(), float) for text in (*queries.values(), *documents.values())}
    expected = [
        by_trec_eval(
            grades[query],
            {
                name: vectors[mine] @ vectors[text]
                for name, text in documents.items()
                if name != query or grades[query].get(name)  # judged by its own data: a pair of equal ids
            },
        )
        for query, mine in queries.items()
    ]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(evaluate, "_CHUNK_DOCUMENTS", chunk)
        model: Any = Coarse()
        found = evaluate.measure_retrieval(model, Retrieval(queries, documents, relevant), 32)
    for metric, value in found.items():
        assert value == pytest.approx(np.mean([one[metric] for one in expected]), abs=1e-9), metric


def relevant_of(grades: Mapping[str, int]) -> dict[str, int]:
    return {name: grade for name, grade in grades.items() if grade > 0}


def by_trec_eval(grades: Mapping[str, int], run: Mapping[str, float]) -> dict[str, float]:
    """trec_eval's rules, said plainly: documents by score, of equal ones the greater id first; a grade above 0 is
    relevant; gains are grades, discounted by log2(rank + 1), over those of the best order of all judged documents."""
    ranked = sorted(run, key=lambda name: (run[name], name), reverse=True)
    relevant = relevant_of(grades)
    gain, ideal, hits, precisions, rank = 0.0, 0.0, 0, 0.0, 0.0
    for place, name in enumerate(ranked[:100], 1):
        if place <= 10:
            gain += max(grades.get(name, 0), 0) / math.log2(place + 1)
        if name in relevant:
            hits += 1
            precisions += hits / place
            rank = rank or (1 / place if place <= 10 else 0.0)
    for place, grade in enumerate(sorted(grades.values(), reverse=True)[:10], 1):
        ideal += max(grade, 0) / math.log2(place + 1)
    every = len(relevant) or 1
    return {
        "ndcg@10": gain / ideal if ideal else 0.0,
        "mrr@10": rank,
        "recall@100": hits / every,
        "map@100": precisions / every,
    }


IDS = st.integers(0, 160).map(str)


@st.composite
def judged_runs(draw: st.DrawFn) -> tuple[dict[str, int], dict[str, float]]:
    """Grades of some documents, and scores of some, tied and negative ones among them; either may be empty."""
    grades = draw(st.dictionaries(IDS, st.integers(-1, 3), min_size=1, max_size=150))
    scores = draw(st.dictionaries(IDS, st.integers(-8, 8).map(lambda n: n / 8), max_size=150))
    return grades, scores


@settings(max_examples=200, deadline=None)
@given(judged_runs())
def test_rankings_are_measured_as_pytrec_eval_does(drawn: tuple[dict[str, int], dict[str, float]]) -> None:
    """And the rules said plainly, by which whole tasks are measured here, are its rules."""
    grades, run = drawn
    ranking = sorted(run, key=lambda name: (run[name], name), reverse=True)
    found, plain = score_ranking(ranking, relevant_of(grades)), by_trec_eval(grades, run)
    assert found == pytest.approx(plain, abs=1e-12)
    library = pytest.importorskip("pytrec_eval", reason="it has wheels for x86_64 only")
    wanted = {"ndcg_cut.10", "map_cut.100", "recall.100", "recip_rank"}
    theirs = library.RelevanceEvaluator({"q": grades}, wanted).evaluate({"q": run})["q"]
    for metric, name in (
        ("ndcg@10", "ndcg_cut_10"),
        ("map@100", "map_cut_100"),
        ("recall@100", "recall_100"),
    ):
        assert plain[metric] == pytest.approx(theirs[name], abs=1e-6), metric
    cut = theirs["recip_rank"] if theirs["recip_rank"] >= 0.0999 else 0.0
    assert plain["mrr@10"] == pytest.approx(cut, abs=1e-6)


def test_a_task_that_vectors_do_not_answer(bert: LocalModel, tmp_path: Path) -> None:
    (tmp_path / "dev.tsv").write_text("a rank\t0\n")
    (tmp_path / "class.yaml").write_text(
        "name: cls\nkind: classification\npublished: here\nfiles: {dev: dev.tsv}\nformat: tsv\n"
        "fields: {first: 1, label: 2}\nlabels: ['0', '1']\nmetrics: [accuracy]\n"
    )
    with pytest.raises(TaskError, match=r"\bkind\b.*\bvectors\b"):
        measure_checkpoint_vectors(bert, load_task(str(tmp_path / "class.yaml")), VectorMeasureSettings())


def test_scores_that_are_all_equal(bert: LocalModel, tmp_path: Path) -> None:
    task = sts(tmp_path)
    (tmp_path / "dev.tsv").write_text("3\ta rank\trows\n3\tloss\tfalls\n")
    with pytest.raises(TaskError, match=r"\bscores\b.*\b3\b"):
        measure_checkpoint_vectors(bert, task, VectorMeasureSettings())


def test_long_texts_are_cut_and_it_is_said(bert: LocalModel, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    task = sts(tmp_path)
    (tmp_path / "dev.tsv").write_text(f"3\ta rank\t{'rows ' * 100}\n1\tloss\tfalls\n")
    with caplog.at_level("WARNING"):
        measure_checkpoint_vectors(bert, task, VectorMeasureSettings())
    assert re.search(r"\b1 of 4 texts\b.*\b24 tokens\b", caplog.text)
