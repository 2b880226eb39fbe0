"""datatrove's blocks give what datatrove gives, in any order of documents, and say before work what they lack."""

import json
import random
from collections import Counter
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from data_service.errors import LibraryChanged, PrepareError
from data_service.prepare import datatrove_blocks
from data_service.prepare.documents import CutDecision, Document, DropDecision
from data_service.prepare.stages import Stage, open_filter
from tests.support.data.hostile_texts import hostile_text

pytest.importorskip("datatrove", reason="needs maskfleet[prepare]")
pytest.importorskip("spacy", reason="needs maskfleet[prepare]")
pytest.importorskip("ahocorasick", reason="needs maskfleet[prepare]")

FILTERS = ("gopher_quality", "gopher_repetition", "c4_quality", "fineweb_quality")
ADAPTER: TypeAdapter[Any] = TypeAdapter(Stage)


def decided(text: str, url: str | None = None, **settings: Any) -> Document | DropDecision:
    stage = ADAPTER.validate_python(settings)
    found = open_filter(stage)(Document("a", text, "s", url=url))
    assert not isinstance(found, CutDecision)
    return found


def theirs(stage: str, text: str, **settings: Any) -> tuple[str, str]:
    """What datatrove's own filter says, with its own defaults: the text it leaves, or the reason."""
    from datatrove.data import Document as Theirs

    document = Theirs(text=text, id="a")
    found = block(stage, json.dumps(settings)).filter(document)
    kept, reason = found if isinstance(found, tuple) else (found, "")
    return ("kept", document.text) if kept else ("dropped", reason)


@cache
def block(stage: str, settings: str) -> Any:
    from datatrove.pipeline import filters

    kinds = {
        "gopher_quality": filters.GopherQualityFilter,
        "gopher_repetition": filters.GopherRepetitionFilter,
        "c4_quality": filters.C4QualityFilter,
        "fineweb_quality": filters.FineWebQualityFilter,
    }
    return kinds[stage](**json.loads(settings))


# The defaults, and settings under which texts reach the later rules.
SETTINGS: dict[str, list[dict[str, Any]]] = {
    "gopher_quality": [
        {},
        {"min_doc_words": 0, "max_symbol_word_ratio": 0.03},
        {"min_doc_words": 2, "max_doc_words": 60, "min_avg_word_length": 2, "max_bullet_lines_ratio": 0.2},
        {
            "min_doc_words": 5,
            "max_symbol_word_ratio": 0,
            "max_avg_word_length": 7,
            "max_non_alpha_words_ratio": 0.9,
        },
        {
            "min_doc_words": 0,
            "min_avg_word_length": 0,
            "max_symbol_word_ratio": 0,
            "max_ellipsis_lines_ratio": 0.1,
        },
        {"min_doc_words": 0, "max_symbol_word_ratio": 0, "min_stop_words": 3, "stop_words": ["river", "."]},
    ],
    "gopher_repetition": [
        {},
        {"dup_line_frac": 0, "dup_para_frac": 0, "dup_line_char_frac": 0, "dup_para_char_frac": 0},
        {"dup_line_frac": 0.1, "dup_para_frac": 0, "dup_line_char_frac": 0.05},
    ],
    "c4_quality": [
        {},
        {"min_num_sentences": 2, "filter_lorem_ipsum": False, "filter_curly_bracket": False},
        {"filter_no_terminal_punct": False, "min_words_per_line": -1, "max_word_length": 200},
        {
            "min_num_sentences": -1,
            "remove_citations": False,
            "filter_javascript": False,
            "max_word_length": -1,
        },
        {"min_num_sentences": 12, "filter_policy": False, "filter_no_terminal_punct": False},
    ],
    "fineweb_quality": [
        {},
        {
            "line_punct_exclude_zero": True,
            "short_line_thr": 0.9,
            "char_duplicates_ratio": 1.0,
            "new_line_ratio": 0.1,
        },
        {"line_punct_thr": 0.0, "short_line_length": 12, "char_duplicates_ratio": 0.05},
    ],
}
REASONS = {
    "gopher_quality": 11,
    "gopher_repetition": 12,
    "c4_quality": 4,
    "fineweb_quality": 5,
}


def check_hostile(stage: str, language: str, texts: int, seed: int) -> Counter[str]:
    """Compare decisions; return how many texts each reason dropped."""
    drawn, seen = random.Random(seed), Counter[str]()
    for _ in range(texts):
        text = hostile_text(drawn)
        if not any(map(str.isalnum, text)):
            continue
        for chosen in SETTINGS[stage]:
            ours = decided(text, stage=stage, language=language, **chosen)
            expected = theirs(stage, text, language=language, **chosen)
            if stage == "c4_quality" and (reason := unwanted(text, chosen)):
                expected = ("dropped", reason)
            elif expected[0] == "kept" and not expected[1].strip():
                expected = ("dropped", "empty")
            shown = ("dropped", ours.reason) if isinstance(ours, DropDecision) else ("kept", ours.text)
            assert shown == expected, (chosen, text)
            seen[shown[1] if shown[0] == "dropped" else ""] += 1
    return seen


def unwanted(text: str, settings: dict[str, Any]) -> str:
    if "lorem ipsum" in text.lower() and settings.get("filter_lorem_ipsum", True):
        return "lorem_ipsum"
    return "curly_bracket" if "{" in text and settings.get("filter_curly_bracket", True) else ""


@pytest.mark.parametrize("stage", FILTERS)
def test_hostile_texts_are_decided_as_datatrove_does(stage: str) -> None:
    seen = check_hostile(stage, "eng", 60, 1)
    assert seen[""] > 5
    assert len(seen) > 3


@pytest.mark.long
@pytest.mark.parametrize("language", ["eng", "deu", "rus"])
@pytest.mark.parametrize("stage", FILTERS)
def test_many_hostile_texts(stage: str, language: str) -> None:
    """Every reason that datatrove has is met."""
    seen = check_hostile(stage, language, 1_000, 2)
    assert len(seen) >= REASONS[stage], seen


@pytest.mark.parametrize("stage", FILTERS)
@settings(max_examples=15, deadline=None)
@given(text=st.text(max_size=300))
def test_any_text_is_decided(stage: str, text: str) -> None:
    assert isinstance(decided(text, stage=stage), Document | DropDecision)


@pytest.mark.long
@pytest.mark.parametrize("stage", FILTERS)
def test_text_in_no_language_and_long_text(stage: str) -> None:
    assert decided("... --- !!!\n\n***", stage=stage) == DropDecision("no_words")
    drawn = random.Random(2)
    long = " ".join("".join(drawn.choices("abcdefg", k=5)) for _ in range(220_000))  # beyond spaCy's usual limit
    assert isinstance(decided(long, stage=stage), Document | DropDecision)


@pytest.mark.long
def test_a_url_is_dropped_by_domain_word_or_list() -> None:
    filtered = {"stage": "url_filter", "domains": ("badplace.org",), "banned_words": ("casino",)}
    assert decided("x", "https://www.badplace.org/a", **filtered) == DropDecision("domain")
    assert decided("x", "https://goodplace.org/casino-a", **filtered) == DropDecision("hard_blacklisted")
    assert isinstance(decided("x", "https://goodplace.org/a", **filtered), Document)
    assert isinstance(decided("x", None, **filtered), Document)


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize(("text", "reason"), [("  if (x) {", "curly_bracket"), ("Lorem ipsum", "lorem_ipsum")])
def test_c4_looks_at_the_whole_page(place: int, text: str, reason: str) -> None:
    """Also at lines that end in no punctuation, which datatrove leaves out before it looks."""
    lines = ["Here is a whole sentence. And here is another one."] * 3
    page = "\n".join([*lines[:place], text, *lines[place:]])
    assert decided(page, stage="c4_quality") == DropDecision(reason)
    assert theirs("c4_quality", page)[0] == "kept"
    kept = decided(page, stage="c4_quality", filter_curly_bracket=False, filter_lorem_ipsum=False)
    assert isinstance(kept, Document)


def test_a_language_without_rules_is_refused_before_work() -> None:
    with pytest.raises(PrepareError, match="gopher_quality"):
        open_filter(ADAPTER.validate_python({"stage": "gopher_quality", "language": "xx-none"}))


@pytest.mark.parametrize(("language", "named"), [("zho", "zho_Hani"), ("arb", "arb_Arab"), ("msa", "msa_Latn")])
def test_a_language_for_which_datatrove_has_another_scripts_rules_is_refused(language: str, named: str) -> None:
    """datatrove 0.10.1 takes the last script of its table, not the one that is marked there."""
    with pytest.raises(PrepareError) as refused:
        open_filter(ADAPTER.validate_python({"stage": "gopher_quality", "language": language}))
    assert named in refused.value.remedy
    open_filter(ADAPTER.validate_python({"stage": "gopher_quality", "language": named}))


@pytest.mark.parametrize("language", ["ron", "zsm", "srp"])
def test_a_language_of_several_scripts_with_its_own_rules_is_taken(language: str) -> None:
    open_filter(ADAPTER.validate_python({"stage": "c4_quality", "language": language}))


def test_a_version_that_was_not_tested_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datatrove_blocks, "version", lambda name: "0.11.0")
    with pytest.raises(LibraryChanged, match=r"0\.11\.0"):
        open_filter(ADAPTER.validate_python({"stage": "fineweb_quality", "short_line_length": 29}))
