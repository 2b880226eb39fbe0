"""A corpus that grows: the same documents as in one that was built at once, and no byte of the old one changed."""

import json
import random
import shutil
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from data_service.corpus.corpus import SPLITS, Corpus, SplitName, open_corpus, verify_corpus
from data_service.corpus.manifest import CONFIGURATION_KEY, MANIFEST_KEY
from data_service.corpus.manifest_file import load_manifest, save_manifest
from data_service.corpus.merge import merge_corpora
from data_service.corpus.merged_ids import DuplicateIdError
from data_service.corpus.provenance import ProvenanceOptions
from data_service.corpus.reader import read_block
from data_service.corpus.removals import load_removals
from data_service.corpus.remove import documents_by_number, remove_documents
from data_service.errors import CorpusError, InputError, UserError
from data_service.ingest.append import APPENDED_PART_FOLDER, AppendReport, append_documents, options_from_corpus
from data_service.ingest.heldout import heldout_options_from_manifest
from data_service.ingest.inputs import list_inputs
from data_service.ingest.options import BuildOptions
from data_service.store.local import LocalStore
from tests.support.data.raw_text import DOCUMENTS as TOPICS
from tests.support.data.raw_text import SMALL, Killed, build, files_of, ignore_progress, origins_of, small_tokenizer
from tests.support.data.text_files import write_lines

BODY = BuildOptions(text_field="body", heldout_fraction=0.2)
Kept = Counter[tuple[SplitName, tuple[int, ...], str | None]]
TEXTS = list(dict.fromkeys(text for topic in TOPICS[:40] for text in topic.split("\n\n") if text.strip()))[:300]


def write(folder: Path, documents: list[tuple[str, str]]) -> Path:
    """Documents as (id, text), in a file of JSON lines."""
    return write_lines(folder / "x.jsonl", ({"name": name, "body": text} for name, text in documents)).parent


def append(corpus: Path, inputs: Path, out: Path, **others: object) -> AppendReport:
    options = options_from_corpus(open_corpus(str(corpus)), workers=1, on_bad_records="error", word_files={}, **others)
    return append_documents(
        str(corpus),
        [str(inputs)],
        str(out),
        options,
        removed_by="x",
        removed_at=1,
        progress=ignore_progress,
        own_provenance="provenance" in others,
    )


def kept(corpus: Corpus) -> Kept:
    """How often each split holds each document (its tokens and its id) that is not removed."""
    chain, found = load_removals(corpus.store, corpus.manifest), Kept()
    for split in SPLITS:
        table, number = corpus.table(split), 0
        ids: dict[tuple[int, int], str | None] = {}
        if corpus.manifest.provenance:
            ids = {(row.block, row.document): row.provenance.id for row in origins_of(corpus, split)}
        for index in range(len(table)):
            block = read_block(corpus.store, table, index)
            edges = block.sentences[block.documents].tolist()
            for document, (start, stop) in enumerate(pairwise(edges)):
                if chain.removal_number(split, number) is None:
                    tokens = tuple(block.tokens[start:stop].tolist())
                    found[split, tokens, ids.get((index, document))] += 1
                number += 1
    return found


@pytest.mark.parametrize("seed", range(2))
def test_copies_that_were_left_out_before_are_not_removed_documents(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    first, second = draw.randint(1, 30), draw.randint(1, 30)
    parts = (range(80), range(80 - first, 120), range(120 - second, 150))
    named = [[("x", TEXTS[number]) for number in part] for part in parts]
    build(write(tmp_path / "in-0", named[0]), tmp_path / "0", BODY)
    report = append(tmp_path / "0", write(tmp_path / "in-1", named[1]), tmp_path / "1")
    assert (report.copies, report.earlier_copies, report.removed) == (first, 0, 0)
    old = open_corpus(str(tmp_path / "1"))
    remove_documents(old, documents_by_number(old, ["0"]), removed_by="y", removed_at=2, reason="asked")
    report = append(tmp_path / "1", write(tmp_path / "in-2", named[2]), tmp_path / "2")
    assert (report.copies, report.earlier_copies, report.removed) == (second, first, 1)
    build(write(tmp_path / "in-3", [("x", TEXTS[number]) for number in range(150, 230)]), tmp_path / "3", BODY)
    uris = [str(tmp_path / name) for name in ("2", "3")]
    merged = merge_corpora(uris, str(tmp_path / "merged"), removed_by="x", removed_at=1)
    assert (merged.copies, merged.earlier_copies, merged.removed) == (0, first + second, 1)
    assert merge_corpora(uris, str(tmp_path / "merged"), removed_by="x", removed_at=1) == merged


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_a_corpus_that_grows_twice_is_one_that_was_built_at_once(tmp_path: Path, seed: int) -> None:
    """With copies within and across, removals meanwhile, whole documents and stretches held out, with ids or without.
    Copies have the id of their original."""
    draw = random.Random(seed)
    size = draw.choice([1, 60])  # long documents, of which stretches are held out
    pool = ["\n\n".join(TEXTS[n : n + size]) for n in range(0, len(TEXTS), size)]
    texts = draw.choices(pool, k=draw.randint(len(pool), 2 * len(pool)))
    documents = [(f"n-{pool.index(text)}", text) for text in texts]
    cuts = sorted(draw.sample(range(4, len(documents)), 2))
    parts = [documents[start:stop] for start, stop in pairwise([0, *cuts, len(documents)])]
    named = {"text_field": "body", "heldout_fraction": 0.01}
    options = SMALL.model_copy(update=named)
    if draw.random() < 0.5:
        options = options.model_copy(update={"provenance": ProvenanceOptions(id="name")})
    build(write(tmp_path / "in-0", parts[0]), tmp_path / "0", options)
    rule = open_corpus(str(tmp_path / "0")).manifest.heldout_rule
    removed, copies, gone_by_hand = Kept(), list[int](), 0
    for number, part in enumerate(parts[1:], 1):
        old = open_corpus(str(tmp_path / str(number - 1)))
        if draw.random() < 0.5:
            before = kept(old)
            gone = draw.randrange(int(old.manifest.train.documents.sum()))
            chosen = documents_by_number(old, [str(gone)])
            remove_documents(old, chosen, removed_by="y", removed_at=2, reason="asked")
            removed, gone_by_hand = removed + (before - kept(old)), gone_by_hand + (before - kept(old)).total()
        unchanged = files_of(tmp_path / "0")
        report = append(tmp_path / str(number - 1), write(tmp_path / f"in-{number}", part), tmp_path / str(number))
        grown = open_corpus(str(tmp_path / str(number)))
        assert verify_corpus(grown.store.uri).damage == ()
        assert files_of(tmp_path / "0") == unchanged
        totals = [int(grown.table(split).documents.sum()) for split in SPLITS]
        assert sum(kept(grown).values()) == sum(totals) - report.copies - report.earlier_copies - report.removed
        assert (report.earlier_copies, report.removed) == (sum(copies), gone_by_hand)
        copies.append(report.copies)
        assert report.documents == sum(totals)
        assert (tmp_path / str(number) / CONFIGURATION_KEY).exists() is False
        again = append(tmp_path / str(number - 1), tmp_path / f"in-{number}", tmp_path / str(number))
        assert again == report
    build(
        write(tmp_path / "in-once", documents),
        tmp_path / "once",
        options.model_copy(update={"heldout_rule": rule}),
    )
    once = kept(open_corpus(str(tmp_path / "once")))
    assert kept(open_corpus(str(tmp_path / "2"))) == once - removed
    assert removed <= once


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
def test_an_id_of_two_corpora_is_refused_unless_one_is_a_copy(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    options = SMALL.model_copy(
        update={"text_field": "body", "provenance": ProvenanceOptions(id="name", may_lack=("id",))}
    )
    sides = [
        [(f"n-{name}", TEXTS[name]) for name in draw.sample(range(100 * side, 100 * side + 100), 60)] for side in (0, 1)
    ]
    common = draw.sample(sides[0], 5)
    sides[1] += common  # copies, with the same ids
    wrong = sorted(name for name, _ in draw.sample(sides[0], draw.choice([0, 1, 3])) if (name, _) not in common)
    sides[1] += [(name, TEXTS[200 + number]) for number, name in enumerate(wrong)]
    sides[1] += [("", TEXTS[210]), ("", TEXTS[211])]  # without an id
    sides[0] += [("", TEXTS[212])]
    draw.shuffle(sides[1])
    for side, documents in enumerate(sides):
        build(write(tmp_path / f"in-{side}", documents), tmp_path / str(side), options)
        rule = heldout_options_from_manifest(open_corpus(str(tmp_path / "0")).manifest)
        options = options.model_copy(update=rule)
    uris = [str(tmp_path / str(side)) for side in (0, 1)]
    if not wrong:
        assert merge_corpora(uris, str(tmp_path / "merged"), removed_by="x", removed_at=1).copies == 5
        assert append(tmp_path / "0", tmp_path / "in-1", tmp_path / "grown").copies == 5
        return
    for grow in (
        lambda: merge_corpora(uris, str(tmp_path / "merged"), removed_by="x", removed_at=1),
        lambda: append(tmp_path / "0", tmp_path / "in-1", tmp_path / "grown"),
    ):
        with pytest.raises(DuplicateIdError) as refused:
            grow()
        assert {line.split("'")[1] for line in refused.value.problem.splitlines()[1:]} == set(wrong)
        assert refused.value.problem.startswith(f"{len(wrong)} ")
    right = [(f"new-{name}" if name in wrong and (name, text) not in common else name, text) for name, text in sides[1]]
    shutil.rmtree(tmp_path / "in-1")
    write(tmp_path / "in-1", right)
    shutil.rmtree(tmp_path / "1")
    build(tmp_path / "in-1", tmp_path / "1", options)
    for grow in (  # at the same places
        lambda: merge_corpora(uris, str(tmp_path / "merged"), removed_by="x", removed_at=1),
        lambda: append(tmp_path / "0", tmp_path / "in-1", tmp_path / "grown"),
    ):
        assert grow().copies == 5


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_killed_at_any_write_and_given_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw = random.Random(seed)
    build(
        write(tmp_path / "in-0", [("a", text) for text in TEXTS[:60]]),
        tmp_path / "0",
        SMALL.model_copy(update={"text_field": "body"}),
    )
    write(tmp_path / "in-1", [("b", text) for text in TEXTS[50:110]])
    append(tmp_path / "0", tmp_path / "in-1", tmp_path / "grown")
    expected = files_of(tmp_path / "grown")
    shutil.rmtree(tmp_path / "grown")
    left = [0]

    def killing(name: str) -> None:
        real = getattr(LocalStore, name)

        def write_or_die(self: LocalStore, *arguments: object) -> object:
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return real(self, *arguments)

        monkeypatch.setattr(LocalStore, name, write_or_die)

    for name in ("put", "put_if_absent", "put_file", "put_buffers", "delete", "delete_many"):
        killing(name)
    deaths = 0
    while True:
        left[0] = draw.randint(1, 12 + deaths)
        try:
            append(tmp_path / "0", tmp_path / "in-1", tmp_path / "grown")
        except Killed:
            deaths += 1
        else:
            break
    assert deaths
    assert files_of(tmp_path / "grown") == expected


@pytest.mark.long
def test_what_cannot_be_appended(tmp_path: Path) -> None:
    options = SMALL.model_copy(update={"text_field": "body"})
    documents = [(str(number), text) for number, text in enumerate(TEXTS[:80])]
    build(write(tmp_path / "in-0", documents), tmp_path / "0", options)
    write(tmp_path / "in-1", [*documents[70:], ("x", TEXTS[90])])
    old = open_corpus(str(tmp_path / "0"))
    with pytest.raises(CorpusError):
        options_from_corpus(
            old, workers=1, on_bad_records="error", word_files={}, provenance=ProvenanceOptions(id="name")
        )
    with pytest.raises(CorpusError):
        options_from_corpus(old, workers=1, on_bad_records="error", word_files={"lexicon": "x"})
    with pytest.raises(CorpusError):
        append(tmp_path / "0", tmp_path / "in-1", tmp_path / "0")
    assert append(tmp_path / "0", tmp_path / "in-1", tmp_path / "grown").copies == 10
    write(tmp_path / "in-2", [("y", TEXTS[91])])
    with pytest.raises(UserError):  # complete, of other text
        append(tmp_path / "0", tmp_path / "in-2", tmp_path / "grown")
    assert verify_corpus(str(tmp_path / "grown")).damage == ()
    (tmp_path / "in-2" / "grown").mkdir()
    for name in (MANIFEST_KEY, "tokenizer", APPENDED_PART_FOLDER):
        shutil.move(tmp_path / "grown" / name, tmp_path / "in-2" / "grown" / name)
    found = list_inputs([str(tmp_path / "in-2")])  # a corpus among the text is left out
    assert [file.key for file in found.files] == ["x.jsonl"]


@pytest.mark.long
def test_settings_are_the_corpuss_own_unless_given(tmp_path: Path) -> None:
    options = BuildOptions(text_field="body", block_tokens=500, sentences="de", split_bytes=5_000, heldout_fraction=0.2)
    documents = [(str(number), text) for number, text in enumerate(TEXTS[:80])]
    build(write(tmp_path / "in-0", documents), tmp_path / "0", options)
    write(tmp_path / "in-1", [("x", text) for text in TEXTS[80:120]])
    append(tmp_path / "0", tmp_path / "in-1", tmp_path / "1")
    (tmp_path / "in-2").mkdir()
    (tmp_path / "in-2" / "y.txt").write_bytes("\n\n".join(TEXTS[120:140]).encode("utf-16-le"))
    append(tmp_path / "1", tmp_path / "in-2", tmp_path / "2", txt_documents="blank_line", encoding="utf-16-le")
    made = [
        open_corpus(str(tmp_path / place)).manifest
        for place in ("0", f"1/{APPENDED_PART_FOLDER}", f"2/{APPENDED_PART_FOLDER}")
    ]
    for name in ("text_field", "block_tokens", "sentences", "split_bytes", "heldout_fraction"):
        assert {manifest.options[name] for manifest in made} == {options.model_dump()[name]}
    assert [manifest.options["txt_documents"] for manifest in made] == ["file", "file", "blank_line"]
    assert sum(kept(open_corpus(str(tmp_path / "2"))).values()) > sum(kept(open_corpus(str(tmp_path / "1"))).values())


def test_constants_of_the_corpus_need_no_match_among_new_files_but_given_ones_do(tmp_path: Path) -> None:
    """What they alone recorded is still recorded: a new document without it is refused by its place."""
    constants = [{"inputs": "*/in-0/*", "licence": "MIT"}]
    known = ProvenanceOptions.model_validate({"id": "name", "licence": "terms", "constants": constants})
    build(
        write(tmp_path / "in-0", [(str(number), text) for number, text in enumerate(TEXTS[:60])]),
        tmp_path / "0",
        SMALL.model_copy(update={"text_field": "body", "provenance": known}),
    )
    inputs = write(tmp_path / "in-1", [("x", TEXTS[90])])
    with pytest.raises(InputError, match=r"x\.jsonl, line 1\b.*'terms'"):
        append(tmp_path / "0", inputs, tmp_path / "1")
    (inputs / "x.jsonl").write_text(json.dumps({"name": "x", "body": TEXTS[90], "terms": "CC0"}) + "\n")
    with pytest.raises(InputError, match="in-0"):
        append(tmp_path / "0", inputs, tmp_path / "1", provenance=known)
    assert append(tmp_path / "0", inputs, tmp_path / "1").added == 1


@pytest.mark.parametrize(
    ("changed", "lines"),
    [({"rules": 2}, "join"), ({"rules": 1}, "join"), ({"lines": "join"}, "join"), ({}, "keep")],
)
def test_text_is_appended_by_the_rule_of_white_space_of_the_corpus(
    tmp_path: Path, changed: dict[str, object], lines: str
) -> None:
    """Before `rules: 3` each line end, with the white space around it, was one space."""
    texts = [f"First line {n}.\n\n    Second  line;\r\n\tthird {n}\n" for n in range(40)]
    build(write(tmp_path / "in-0", [("x", text) for text in texts[:30]]), tmp_path / "0", BODY)
    store = LocalStore(tmp_path / "0")
    manifest = load_manifest(store)
    save_manifest(store, replace(manifest, options=manifest.options | changed, loss=None))
    append(tmp_path / "0", write(tmp_path / "in-1", [("x", text) for text in texts[30:]]), tmp_path / "1")
    added = open_corpus(str(tmp_path / "1" / APPENDED_PART_FOLDER))
    assert added.manifest.options["lines"] == lines
    found = {small_tokenizer().decode(tokens) for _, tokens, _ in kept(added)}
    joined = {f"First line {n}. Second  line; third {n}" for n in range(30, 40)}
    assert found == (joined if lines == "join" else set(texts[30:]))
