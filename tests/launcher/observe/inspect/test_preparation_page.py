"""The page on a preparation: it holds what the statistics say, and nothing of the text of others as HTML."""

import re
from typing import Any

import pytest

from data_service.prepare.configuration import Preparation
from data_service.prepare.prepare import prepare
from data_service.prepare.statistics import Statistics
from launcher.observe.inspect.report.preparation import render
from tests.support.data.raw_text import DOCUMENTS, ignore_progress, write_jsonl

HOSTILE = '<script>alert("x")</script>'


@pytest.fixture(scope="module")
def statistics(tmp_path_factory: pytest.TempPathFactory) -> Statistics:
    folder = tmp_path_factory.mktemp("in")
    write_jsonl(folder / "a.jsonl", [*(text[:2_000] for text in DOCUMENTS[:40]), "short", ""])
    write_jsonl(folder / "b.jsonl", [text[:900] for text in DOCUMENTS[30:60]])
    inputs: list[dict[str, Any]] = [
        {"source": HOSTILE, "files": [str(folder / "a.jsonl")], "constants": {"licence": HOSTILE}},
        {"source": "b", "files": [str(folder / "b.jsonl")]},
    ]
    stages = [{"stage": "length", "least_characters": 300}, {"stage": "exact_duplicates"}]
    made = Preparation.model_validate({"inputs": inputs, "stages": stages})
    return prepare(made, str(folder / "out"), 1, ignore_progress)


def test_every_number_stands_on_the_page(statistics: Statistics) -> None:
    page = render(statistics)
    cells = re.findall(r"<t[dh][^>]*>([^<]*)</t[dh]>", page)
    for source in statistics.sources.values():
        assert f"{source.documents_read:,}" in cells
        for reasons in source.dropped.values():
            assert set(reasons) <= set(cells)
    assert {stage.stage for stage in statistics.stages} <= set(cells)
    assert f"<b>{statistics.documents_kept:,}</b>" in page
    assert f"<b>{statistics.documents_read - statistics.documents_kept:,}</b>" in page


def test_lengths_are_those_of_the_documents(statistics: Statistics) -> None:
    texts = [*(text[:2_000] for text in DOCUMENTS[:40]), "short", *(text[:900] for text in DOCUMENTS[30:60])]
    counted = {1 << n: sum(1 << n <= len(text) < 2 << n for text in texts) for n in range(20)}
    assert statistics.lengths_read == {step: count for step, count in counted.items() if count}
    assert sum(statistics.lengths_kept.values()) == statistics.documents_kept
    assert "<svg" in render(statistics)


def test_names_of_others_are_text_and_nothing_is_fetched(statistics: Statistics) -> None:
    page = render(statistics)
    assert "<script" not in page
    assert not re.search(r"(src|href)=", page)


def test_statistics_of_an_older_version_have_a_page_without_lengths(statistics: Statistics) -> None:
    older = statistics.model_dump(mode="json", exclude={"lengths_read", "lengths_kept"})
    assert "<svg" not in render(Statistics.model_validate(older))


def test_what_was_cut_is_named_by_task(statistics: Statistics) -> None:
    *before, last = statistics.stages
    cut = last.model_copy(update={"cut": {"sst2/dev": 7}})
    page = render(statistics.model_copy(update={"stages": [*before, cut]}))
    assert "sst2/dev 7" in page
    assert "sst2/dev" not in render(statistics)
