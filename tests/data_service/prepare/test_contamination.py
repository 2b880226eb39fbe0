"""Documents that hold text of evaluation sets, held to a search by words."""

import hashlib
import json
import random
import tempfile
import unicodedata
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from data_service.errors import PrepareError
from data_service.prepare.configuration import Preparation
from data_service.prepare.contamination import (
    MAX_TEXTS_PER_RUN,
    MIN_TEXT_WORDS,
    RUN_WORDS,
    Decontaminate,
    EvaluationText,
    NgramIndex,
    build_index,
    dump_index,
    load_index,
)
from data_service.prepare.documents import CutDecision, Document, DropDecision
from data_service.prepare.prepare import prepare
from data_service.prepare.shingles import hash_units, hash_units_by_line
from data_service.prepare.stages import DocumentFilter, open_filter
from tests.support.data import preparations
from tests.support.data.raw_text import ignore_progress

Run = tuple[str, ...]


def runs_of(text: str) -> set[Run]:
    words = text.split()
    span = min(RUN_WORDS, len(words))
    return (
        {tuple(words[at : at + span]) for at in range(len(words) - span + 1)} if len(words) >= MIN_TEXT_WORDS else set()
    )


def owners_of(texts: list[EvaluationText]) -> dict[Run, tuple[int, int]]:
    """The first example, by split and number, of each run that is no template."""
    splits = list(dict.fromkeys(text.split for text in texts))
    owners: dict[Run, tuple[int, int]] = {}
    for place, split in enumerate(splits):
        different: dict[str, int] = {}
        for text in texts:
            if text.split == split:
                different.setdefault(text.text, text.number)
        counts = Counter(run for one in different for run in runs_of(one))
        for one, number in different.items():
            for run in runs_of(one):
                if counts[run] <= MAX_TEXTS_PER_RUN:
                    owners[run] = min(owners.get(run, (place, number)), (place, number))
    return owners


def search(texts: list[EvaluationText], document: str) -> list[tuple[str, int]]:
    """The examples whose runs stand in the document."""
    splits = list(dict.fromkeys(text.split for text in texts))
    words, owners = document.split(), owners_of(texts)
    found = set()
    for run, owner in owners.items():
        if any(tuple(words[at : at + len(run)]) == run for at in range(len(words) - len(run) + 1)):
            found.add(owner)
    return [(splits[place], number) for place, number in sorted(found)]


words = st.sampled_from(["a", "b"])
evaluation_texts = st.lists(
    st.builds(
        EvaluationText,
        st.sampled_from(["x/dev", "y/test"]),
        st.integers(0, 30),
        st.lists(words, min_size=MIN_TEXT_WORDS - 2, max_size=RUN_WORDS + 5).map(" ".join),
    ),
    min_size=1,
    max_size=40,
)


@pytest.mark.long
@settings(deadline=None, max_examples=150)
@given(evaluation_texts, st.lists(words, max_size=60).map(" ".join))
def test_as_a_search_by_words(drawn: list[EvaluationText], document: str) -> None:
    """With two words, runs meet by chance, and many texts have the same."""
    texts = [EvaluationText(one.split, number, one.text) for number, one in enumerate(drawn)]
    try:
        index = build_index(texts)
    except PrepareError:
        counted = [runs_of(text.text) for text in texts]
        assert not any(counted) or sum(map(bool, counted)) > MAX_TEXTS_PER_RUN
        return
    assert index.find_matching_texts(document) == search(texts, document)
    assert (np.diff(index.keys.astype(object)) > 0).all()


@pytest.mark.long
@settings(deadline=None, max_examples=150)
@given(evaluation_texts, st.lists(st.lists(words, max_size=12).map(" ".join), max_size=12))
def test_lines_with_a_part_of_a_run_are_cut(drawn: list[EvaluationText], lines: list[str]) -> None:
    texts = [EvaluationText(one.split, number, one.text) for number, one in enumerate(drawn)]
    try:
        index = build_index(texts)
    except PrepareError:
        return
    found = search(texts, " ".join(lines))
    owners = [number for number, line in enumerate(lines) for _ in line.split()]
    written = " ".join(lines).split()
    gone = {
        owners[at + offset]
        for run in owners_of(texts)
        for at in range(len(written) - len(run) + 1)
        if tuple(written[at : at + len(run)]) == run
        for offset in range(len(run))
    }
    rest = "\n".join(line for number, line in enumerate(lines) if number not in gone)
    decided = open_stage(index)(Document("d", "\n".join(lines), "web"))
    if not found:
        assert decided == Document("d", "\n".join(lines), "web")
    elif rest.strip() and not search(texts, rest):
        assert decided == CutDecision(Document("d", rest, "web"), found[0][0])
    else:
        assert isinstance(decided, DropDecision)


@given(st.text(st.characters(codec="utf-8") | st.sampled_from("\n\n aé字か")))
def test_lines_have_the_units_of_their_text(text: str) -> None:
    lines, units, line_of = hash_units_by_line(text)
    assert "\n".join(lines) == text
    assert len(units) == len(line_of)
    if any(unicodedata.category(character)[0] in "LNM" for character in unicodedata.normalize("NFKC", text)):
        assert units.tolist() == hash_units(text).tolist()
    else:
        assert not len(units)


def open_stage(index: NgramIndex) -> DocumentFilter:
    """The stage `decontaminate` that cuts, with this index."""
    content = dump_index(index)
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        sha256 = hashlib.sha256(content).hexdigest()
        return open_filter(Decontaminate(stage="decontaminate", index=file.name, sha256=sha256, found="cut"))


def sentence(draw: random.Random, length: int, alphabet: str) -> str:
    return " ".join("".join(draw.choices(alphabet, k=draw.randint(3, 8))) for _ in range(length))


@pytest.mark.parametrize("alphabet", ["abcdefghij", "абвгдежзик", "αβγδεζηθικ", "éèêëàâîïôû"])
def test_case_marks_and_spaces_make_no_difference(alphabet: str) -> None:
    draw = random.Random(4)
    text = sentence(draw, 20, alphabet)
    index = build_index([EvaluationText("t/dev", 7, text)])
    broken = text.upper().replace(" ", ",\n  ")
    other = f"{sentence(draw, 9, alphabet)}: «{broken}!» {sentence(draw, 5, alphabet)}"
    assert index.find_matching_texts(other) == [("t/dev", 7)]
    assert index.find_matching_texts(sentence(draw, 200, alphabet)) == []


def test_scripts_without_spaces_are_compared_by_characters() -> None:
    text = "今日は天気がとても良いので公園へ散歩に行きました"
    index = build_index([EvaluationText("t/test", 0, text)])
    assert index.find_matching_texts(f"昨日の話です。{text[3:19]}。終わり") == [("t/test", 0)]
    assert index.find_matching_texts(f"昨日の話です。{text[3:12]}。終わり") == []


def test_what_cannot_be_looked_up_is_counted() -> None:
    draw = random.Random(3)
    template = sentence(draw, 14, "abcdef")
    texts = [EvaluationText("t/dev", n, f"{template} {n}") for n in range(MAX_TEXTS_PER_RUN + 1)]
    texts += [EvaluationText("t/dev", 20, "too short"), EvaluationText("t/dev", 21, sentence(draw, 9, "ab"))]
    (split,) = build_index(texts).splits
    assert (split.texts, split.looked_up) == (13, 12)  # the last run of each is its own
    with pytest.raises(PrepareError):
        build_index([EvaluationText("t/dev", 0, "too short")])


def test_an_index_is_read_as_it_was_written_and_damage_is_an_error(tmp_path: Path) -> None:
    draw = random.Random(9)
    index = build_index([EvaluationText("t/dev", n, sentence(draw, 20, "abc")) for n in range(5)])
    data, path = dump_index(index), tmp_path / "x.ngrams"
    assert dump_index(index) == data
    path.write_bytes(data)
    found = load_index(str(path))
    assert found.splits == index.splits
    for name in ("spans", "keys", "texts"):
        np.testing.assert_array_equal(getattr(found, name), getattr(index, name))
    stage = {"stage": "decontaminate", "index": str(path), "sha256": "0" * 64}
    source: dict[str, Any] = {"source": "a", "files": [str(tmp_path / "a.txt")]}
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(PrepareError, match="SHA-256"):
        prepare(
            Preparation.model_validate({"inputs": [source], "stages": [stage]}),
            str(tmp_path / "out"),
            1,
            ignore_progress,
        )
    older = {"title": np.frombuffer(b"maskfleet ngrams 1", dtype=np.uint8)}  # its hashes fold case in another way
    with np.load(path) as stored, (tmp_path / "older.ngrams").open("wb") as file:
        np.savez(file, **dict(stored) | older)
    with pytest.raises(PrepareError, match=r"older\.ngrams"):
        load_index(str(tmp_path / "older.ngrams"))
    for cut in (0, 10, len(data) // 2):
        path.write_bytes(data[:cut])
        with pytest.raises(PrepareError):
            load_index(str(path))
    path.write_bytes(json.dumps({"no": "index"}).encode())
    with pytest.raises(PrepareError):
        load_index(str(path))
    with pytest.raises(PrepareError):
        load_index(str(tmp_path / "none"))


def test_a_stage_that_cuts_text_is_refused_behind_the_last_search_of_an_index() -> None:
    drawn = random.Random(3)
    searches = [
        {"stage": "decontaminate", "index": name, "sha256": name * 64, "found": found}
        for name in "ab"
        for found in ("drop", "cut")
    ]
    others = [{"stage": name} for name in ("length", "exact_duplicates", "duplicate_paragraphs", "c4_quality", "pii")]
    ends = Counter[bool]()
    for _ in range(300):
        stages = drawn.choices([*searches, *others], k=drawn.randint(1, 5))
        searched = set[str]()  # indexes of which no text is there after the stages so far
        for stage in stages:
            if stage["stage"] in ("duplicate_paragraphs", "c4_quality") or stage.get("found") == "cut":
                searched = set()
            searched |= {stage["sha256"]} if "sha256" in stage else set()
        kept = searched == {stage["sha256"] for stage in stages if "sha256" in stage}
        with nullcontext() if kept else pytest.raises(ValidationError, match="decontaminate"):
            Preparation.model_validate({"inputs": [{"source": "a", "files": ["a.txt"]}], "stages": stages})
        ends[kept] += 1
    assert min(ends[True], ends[False]) > 50


def test_no_text_that_a_cut_joined_is_left(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(20)]
    data = dump_index(build_index([EvaluationText("t/dev", 0, " ".join(words))]))
    (tmp_path / "x.ngrams").write_bytes(data)
    search = {"stage": "decontaminate", "index": f"{tmp_path}/x.ngrams", "sha256": hashlib.sha256(data).hexdigest()}
    texts = [f"text number {number} of all\nSubscribe to our newsletter\nand more of {number}" for number in range(4)]
    joined = "\n".join([" ".join(words[:10]), "Subscribe to our newsletter", " ".join(words[10:])])
    source = preparations.write_lines(tmp_path / "a.jsonl", [{"text": text} for text in [joined, *texts]])
    statistics = preparations.run(
        [source], [{"stage": "duplicate_paragraphs", "most_documents": 3}, search], tmp_path / "out"
    )
    assert [split.split for split in statistics.searched] == ["t/dev"]
    assert statistics.stages[-1].dropped == {"t/dev": 1}
    assert len(preparations.rows_of(tmp_path / "out/documents")) == 4
