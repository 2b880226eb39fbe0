"""datatrove's blocks give what datatrove gives, in any order of documents, and say before work what they lack."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from data_service.errors import LibraryChanged, PrepareError
from data_service.prepare import datatrove_blocks
from data_service.prepare.documents import Cut, Document, Drop
from data_service.prepare.stages import Stage, check_stage, open_filter
from tests.support.data.raw_text import DOCUMENTS

pytest.importorskip("datatrove", reason="needs maskfleet[prepare]")
pytest.importorskip("spacy", reason="needs maskfleet[prepare]")
pytest.importorskip("ahocorasick", reason="needs maskfleet[prepare]")

FILTERS = ("gopher_quality", "gopher_repetition", "c4_quality", "fineweb_quality")
ADAPTER: TypeAdapter[Any] = TypeAdapter(Stage)


def decided(text: str, url: str | None = None, **settings: Any) -> Document | Drop:
    stage = ADAPTER.validate_python(settings)
    found = open_filter(stage)(Document("a", text, "s", url=url))
    assert not isinstance(found, Cut)
    return found


def theirs(stage: str, text: str) -> tuple[str, str]:
    """What datatrove's own filter with its own defaults says: the text it leaves, or the reason."""
    from datatrove.data import Document as Theirs
    from datatrove.pipeline import filters

    kinds = {
        "gopher_quality": filters.GopherQualityFilter,
        "gopher_repetition": filters.GopherRepetitionFilter,
        "c4_quality": filters.C4QualityFilter,
        "fineweb_quality": filters.FineWebQualityFilter,
    }
    document = Theirs(text=text, id="a")
    found = kinds[stage]().filter(document)
    kept, reason = found if isinstance(found, tuple) else (found, "")
    return ("kept", document.text) if kept else ("dropped", reason)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("stage", FILTERS)
def test_our_defaults_are_datatroves(stage: str) -> None:
    seen = set()
    texts = [*DOCUMENTS[:40], "Short.", "word " * 400, "A line.\n" * 60]
    for text in (text for text in texts if "{" not in text):  # see the test of C4's pages
        ours = decided(text, stage=stage)
        shown = ("dropped", ours.reason) if isinstance(ours, Drop) else ("kept", ours.text)
        assert shown == theirs(stage, text)
        seen.add(shown[0])
    assert "dropped" in seen


@pytest.mark.parametrize("stage", FILTERS)
@settings(max_examples=15, deadline=None)
@given(text=st.text(max_size=300))
def test_any_text_is_decided(stage: str, text: str) -> None:
    assert isinstance(decided(text, stage=stage), Document | Drop)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("stage", FILTERS)
def test_text_in_no_language_and_long_text(stage: str) -> None:
    assert decided("... --- !!!\n\n***", stage=stage) == Drop("no_words")
    drawn = random.Random(2)
    long = " ".join(
        "".join(drawn.choices("abcdefg", k=5)) for _ in range(220_000)
    )  # beyond spaCy's usual limit
    assert isinstance(decided(long, stage=stage), Document | Drop)


def test_a_url_is_dropped_by_domain_word_or_list() -> None:
    filtered = {"stage": "url_filter", "domains": ("badplace.org",), "banned_words": ("casino",)}
    assert decided("x", "https://www.badplace.org/a", **filtered) == Drop("domain")
    assert decided("x", "https://goodplace.org/casino-a", **filtered) == Drop("hard_blacklisted")
    assert isinstance(decided("x", "https://goodplace.org/a", **filtered), Document)
    assert isinstance(decided("x", None, **filtered), Document)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(
    ("text", "reason"), [("  if (x) {", "curly_bracket"), ("Lorem ipsum", "lorem_ipsum")]
)
def test_c4_looks_at_the_whole_page(place: int, text: str, reason: str) -> None:
    """Also at lines that end in no punctuation, which datatrove leaves out before it looks."""
    lines = ["Here is a whole sentence. And here is another one."] * 3
    page = "\n".join([*lines[:place], text, *lines[place:]])
    assert decided(page, stage="c4_quality") == Drop(reason)
    assert theirs("c4_quality", page)[0] == "kept"
    kept = decided(page, stage="c4_quality", filter_curly_bracket=False, filter_lorem_ipsum=False)
    assert isinstance(kept, Document)


def test_a_language_without_rules_is_refused_before_work() -> None:
    with pytest.raises(PrepareError, match="gopher_quality"):
        check_stage(ADAPTER.validate_python({"stage": "gopher_quality", "language": "xx-none"}))


def test_a_version_that_was_not_tested_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datatrove_blocks, "version", lambda name: "0.11.0")
    with pytest.raises(LibraryChanged, match=r"0\.11\.0"):
        check_stage(ADAPTER.validate_python({"stage": "fineweb_quality", "short_line_length": 29}))
