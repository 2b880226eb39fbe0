"""`tests/bench/retrieval.py`: what its task is made of, what it compares, and its figures. It is run by hand."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from retrieval import (
    FRESH,
    WAYS,
    Bench,
    Measured,
    Pair,
    Trial,
    bm25,
    is_measured,
    pairs_of,
    recipe_of,
    render,
    trials,
    write_texts,
)
from sections import Document

from launcher.runtime.recipe.identity import changed, identity

WORDS = "a paragraph of prose has a dozen words or more, as this one has, about"
LICENCE = "this document is placed in the public domain or under a licence that says the same"


def document(number: int, *, markdown: bool = False) -> Document:
    head, line = ("## {}\n", "") if markdown else ("{}\n", "=======\n")
    parts = [f"{head.format(f'Part {i}')}{line}\n{WORDS} part {i} of {number}.\n\nMore.\n" for i in "ABA"]
    parts.append(f"{head.format('Copyright')}{line}\n{LICENCE}\n")
    start = "" if markdown else f"PEP: {number}\nTitle: Things {number}\n"
    return Document(f"{number}-things-{number}.md", "\n".join([start, *parts]))


@pytest.mark.parametrize("markdown", [False, True])
def test_a_heading_asks_once_for_the_paragraph_below_it(markdown: bool) -> None:
    found = list(pairs_of([document(1), document(7, markdown=markdown)]))[
        3:
    ]  # the licence is the first one's
    title = "things 7" if markdown else "Things 7"
    assert found == [Pair(f"{title}: part {i}", f"{WORDS} part {i.upper()} of 7.") for i in "ab"]


def test_no_document_is_both_trained_on_and_measured(tmp_path: Path) -> None:
    documents = [document(number) for number in range(120)]
    measured = write_texts(documents, tmp_path)
    assert measured == list(pairs_of(filter(is_measured, documents)))
    assert 0 < len(measured) < 120
    trained = (tmp_path / "text.jsonl").read_text() + (tmp_path / "pairs.jsonl").read_text()
    assert not any(pair.text in trained for pair in measured if pair.text != LICENCE)
    pairs = (tmp_path / "pairs.jsonl").read_text().splitlines()
    assert len(pairs) + len(measured) == 2 * 120 + 2  # and a licence each
    queries = [json.loads(line) for line in (tmp_path / "task/queries.jsonl").open()]
    texts = {
        record["_id"]: record["text"] for record in map(json.loads, (tmp_path / "task/corpus.jsonl").open())
    }
    judged = dict(line.split("\t")[:2] for line in (tmp_path / "task/qrels.tsv").read_text().splitlines()[1:])
    assert [Pair(query["text"], texts[judged[query["_id"]]]) for query in queries] == measured


@given(st.lists(st.text("abc ", max_size=20), min_size=2, max_size=8))
def test_a_word_that_one_text_alone_has_finds_it(texts: list[str]) -> None:
    pairs = [Pair(f"word{i}", f"{text} word{i}") for i, text in enumerate(texts)]
    assert bm25(pairs) == pytest.approx(1.0)
    assert bm25([Pair("nothing", pair.text) for pair in pairs]) == 0.0


def test_the_right_text_counts_as_the_last_of_equals_and_not_beyond_ten() -> None:
    assert bm25([Pair("same", "same"), Pair("same", "same")]) == pytest.approx(1 / math.log2(3))
    assert bm25([Pair("same", "same")] * 10) == pytest.approx(1 / math.log2(11))
    assert bm25([Pair("same", "same")] * 11) == 0.0
    assert bm25([Pair("b", "a b"), Pair("a", "b b")]) == pytest.approx(0.5 / math.log2(3))


def test_runs_of_a_stage_differ_in_their_objective_alone(tmp_path: Path) -> None:
    bench = Bench(tmp_path, (100, 50, 20))
    for pairs, ways in ((False, tuple(WAYS)), (True, (*WAYS, FRESH))):
        first, *others = [identity(recipe_of(Trial(way, pairs, 2), bench)) for way in ways]
        differing = {path.partition(".")[0] for other in others for path in changed(first, other)}
        assert differing == ({"start"} if pairs else {"objective"})


def test_every_run_starts_from_an_earlier_one_with_batches_of_its_own(tmp_path: Path) -> None:
    bench, earlier = Bench(tmp_path, (100, 50, 20)), dict[str, int]()
    for trial in trials(2):
        recipe = recipe_of(trial, bench)
        assert recipe.start == "scratch" or earlier[recipe.start] < recipe.seed
        earlier[str(bench.place(trial))] = recipe.seed
        assert sum(phase.steps for phase in recipe.phases) in bench.steps
    assert len(earlier) == 8


def test_the_table_has_means_and_spreads() -> None:
    found = [
        Measured("RetroMAE", pairs, seed, cpu_seconds=60.0, ndcg={"cls": 0.1 * seed, "mean": 0.05})
        for seed in (1, 2, 3)
        for pairs in (False, True)
    ]
    lines = render(found, 0.5).splitlines()
    assert "| RetroMAE | 60 | 5.0 (5.0 to 5.0) | 20.0 (10.0 to 30.0) | 20.0 (10.0 to 30.0) |" in lines
    assert f"| {FRESH} | - | - | - | - |" in lines
    assert "50.0" in lines[-1]
