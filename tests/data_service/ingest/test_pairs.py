"""Corpora of pairs: the same examples from every format, one document each, a query on one side; bad ones named."""

import csv
import random
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.corpus.corpus import open_corpus, show_documents, verify_corpus
from data_service.corpus.manifest import PairTexts
from data_service.corpus.manifest_file import dump_manifest, parse_manifest
from data_service.corpus.reader import read_block
from data_service.corpus.words import WordOptions
from data_service.errors import CorpusError, InputError
from data_service.ingest.options import BuildOptions, PairFields
from data_service.ingest.records import BadRecord, TextRecord
from data_service.ingest.scan import hash_texts
from data_service.samples.packing import PackedInput
from data_service.samples.texts import RepeatedSentences, TextPairs
from data_service.store.open import open_store
from data_service.stream.sources import check_corpus_kind
from data_service.stream.statistics import corpus_stats
from tests.support.data.raw_text import DOCUMENTS, build, small_tokenizer
from tests.support.data.text_files import records_of, write_lines, write_table

SENTENCES = [" ".join(part.split()) for text in DOCUMENTS for part in text.split(". ") if 20 < len(part) < 200]
Record = dict[str, object]


def options(count: int = 2, **more: object) -> BuildOptions:
    settings = {"heldout_fraction": 0.1, "split_bytes": 20_000, "block_tokens": 2_000} | more
    return BuildOptions.model_validate({"pairs": PairFields(count=count), **settings})


def made_records(count: int, queries: int) -> list[Record]:
    """Examples of so many queries, each with three negatives; all texts are single lines."""
    return [
        {
            "query": SENTENCES[i % queries],
            "positive": SENTENCES[100 + i],
            "negatives": [SENTENCES[(7 * i + j) % 900] for j in range(3)],
        }
        for i in range(count)
    ]


def write_flat(path: Path, records: list[Record]) -> Path:
    """A table with a column for each negative."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writerow(["query", "positive", "one", "two", "three"])
        for record in records:
            assert isinstance(record["negatives"], list)
            writer.writerow([record["query"], record["positive"], *record["negatives"]])
    return path


def test_every_format_gives_the_same_examples(tmp_path: Path) -> None:
    records = made_records(40, 30)
    table = pa.table({name: [record[name] for record in records] for name in records[0]})
    write_table(tmp_path / "a.parquet", table)
    large = table.cast(
        pa.schema([("query", "string"), ("positive", "large_string"), ("negatives", pa.large_list(pa.string()))])
    )
    write_table(tmp_path / "a.arrow", large, 9, with_footer=True)
    write_lines(tmp_path / "a.jsonl", records)
    write_lines(tmp_path / "b.jsonl.gz", records)
    expected = [(r["query"], r["positive"], *r["negatives"][:2]) for r in records]  # type: ignore[index]
    for name in ("a.parquet", "a.arrow", "a.jsonl", "b.jsonl.gz"):
        found = records_of(tmp_path / name, options())
        assert [record.texts for record in found if isinstance(record, TextRecord)] == expected
    columns = PairFields(count=2, negatives=("one", "two", "three"))
    for name in ("c.csv", "c.tsv"):
        found = records_of(write_flat(tmp_path / name, records), BuildOptions(pairs=columns))
        assert [record.texts for record in found if isinstance(record, TextRecord)] == expected


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 examples of 200 queries, ten of them twice, and three with a blank text."""
    folder = tmp_path_factory.mktemp("pairs")
    records = made_records(300, 200)
    blank: list[Record] = [{**records[i], "positive": " \n"} for i in range(3)]
    write_lines(folder / "in" / "a.jsonl", records[:150] + blank)
    write_lines(folder / "in" / "b.jsonl.gz", records[150:] + records[:10])
    build(folder / "in", folder / "corpus", options())
    return folder / "corpus"


def examples_of(corpus: Path) -> dict[str, list[tuple[str, ...]]]:
    opened, tokenizer = open_corpus(str(corpus)), small_tokenizer()
    found: dict[str, list[tuple[str, ...]]] = {"train": [], "heldout": []}
    for split, table in (("train", opened.manifest.train), ("heldout", opened.manifest.heldout)):
        for index in range(len(table)):
            block = read_block(opened.store, table, index)
            texts = [tokenizer.decode(block.tokens[a:b]) for a, b in pairwise(block.sentences)]
            found[split] += [tuple(texts[a:b]) for a, b in pairwise(block.documents)]
    return found


@pytest.mark.long
def test_every_example_is_one_document_and_copies_are_dropped(corpus: Path) -> None:
    found = examples_of(corpus)
    expected = {(r["query"], r["positive"], *r["negatives"][:2]) for r in made_records(300, 200)}  # type: ignore[index]
    assert sorted(found["train"] + found["heldout"]) == sorted(expected)
    counts = corpus_stats(str(corpus)).counts
    assert (counts["duplicates"], counts["empty"], counts["skipped"]) == (10, 3, 0)
    assert open_corpus(str(corpus)).manifest.pairs == PairTexts(2)
    assert not verify_corpus(str(corpus)).damage


def test_examples_of_one_query_are_on_one_side(corpus: Path) -> None:
    sides = defaultdict(set)
    for split, examples in examples_of(corpus).items():
        for example in examples:
            sides[example[0]].add(split)
    assert all(len(split) == 1 for split in sides.values())
    assert {"train", "heldout"} == set.union(*sides.values())


def test_documents_are_shown_as_examples_and_stats_are_of_rows_of_pairs(corpus: Path) -> None:
    (shown,) = show_documents(str(corpus), "train", 3)
    assert shown.pairs is not None
    assert shown.pairs.text_names == ("query", "positive", "negative 1", "negative 2")
    assert len(shown.sentences) == 4
    stats = corpus_stats(str(corpus), batch=64)
    assert stats.pairs == PairTexts(2)
    assert stats.radius is not None
    assert stats.radius.rows == 64


def test_bad_records_are_named_or_skipped_and_counted(tmp_path: Path) -> None:
    good = made_records(30, 30)
    bad: dict[str, Record] = {
        "no field 'positive'": {"query": "q"},
        "it is null": {"query": None, "positive": "p", "negatives": ["n", "m"]},
        "holds int": {"query": "q", "positive": 3, "negatives": ["n", "m"]},
        "holds 2 texts": {"query": ["q", "r"], "positive": "p", "negatives": ["n", "m"]},
        "1 negatives in 'negatives'": {"query": "q", "positive": "p", "negatives": ["n", " "]},
        "0 negatives": {"query": "q", "positive": "p"},
        "holds dict": {"query": "q", "positive": "p", "negatives": [{"text": "n"}, "m"]},
        "more than 1,500 bytes": {"query": "q" * 800, "positive": "p" * 800, "negatives": ["n", "m"]},
    }
    for number, (reason, record) in enumerate(bad.items()):
        path = write_lines(tmp_path / str(number) / "a.jsonl", [*good[:5], record])
        with pytest.raises(InputError, match=reason) as raised:
            records_of(path, options(max_document_bytes=1500))
        assert "a.jsonl, line 6: " in raised.value.problem
    write_lines(tmp_path / "in" / "a.jsonl", [*good, *bad.values()])
    build(tmp_path / "in", tmp_path / "corpus", options(max_document_bytes=1500, on_bad_records="skip"))
    stats = corpus_stats(str(tmp_path / "corpus"))
    assert stats.counts["skipped"] == len(bad)
    assert stats.train.documents + stats.heldout.documents == len(good)
    assert all(reason in text for reason, text in zip(bad, stats.skipped, strict=True))


@pytest.mark.parametrize(("field", "deepest"), [("query", 1), ("positive", 1), ("negatives", 1), ("words", 2)])
def test_lists_deeper_than_a_field_needs_are_bad_records(tmp_path: Path, field: str, deepest: int) -> None:
    """Also so deep ones that Python could not follow them."""
    drawn = random.Random(f"lists {field}")
    depths = drawn.choices([0, 1, 2, 3, 4, 400, 700, 950], k=40)
    chosen = options(1) if field != "words" else BuildOptions(words=WordOptions(segmenter="field"))
    fields = ("query", "positive", "negatives") if field != "words" else ("text", "words")
    lines = []
    for depth in depths:
        values = dict.fromkeys(fields, '"text"') | {field: "[" * depth + '"text"' + "]" * depth}
        lines.append("{" + ", ".join(f'"{name}": {value}' for name, value in values.items()) + "}\n")
    (tmp_path / "a.jsonl").write_text("".join(lines))
    found = records_of(tmp_path / "a.jsonl", chosen.model_copy(update={"on_bad_records": "skip"}))
    assert [isinstance(record, BadRecord) for record in found] == [depth > deepest for depth in depths]
    first = next(line for line, depth in enumerate(depths, 1) if depth > deepest)
    with pytest.raises(InputError, match=rf"a\.jsonl, line {first}: "):
        records_of(tmp_path / "a.jsonl", chosen)


def test_text_without_fields_and_tables_without_the_columns_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(InputError, match=r"a\.txt: .*fields"):
        records_of(tmp_path / "a.txt", options())
    (tmp_path / "a.csv").write_text("query,answer\nq,a\n")
    with pytest.raises(InputError, match=r"a\.csv: .*'positive'"):
        records_of(tmp_path / "a.csv", options(0))
    pq.write_table(pa.table({"query": ["q"], "positive": [["p"]]}), tmp_path / "a.parquet")
    with pytest.raises(InputError, match=r"a\.parquet: .*'positive'.*\btype\b"):
        records_of(tmp_path / "a.parquet", options(0))


def test_few_examples_are_held_out_whole(tmp_path: Path) -> None:
    long: list[Record] = [
        {"query": f"{i} {SENTENCES[i]}", "positive": " ".join(SENTENCES[i : i + 60])} for i in range(3)
    ]
    build(write_lines(tmp_path / "in" / "a.jsonl", long).parent, tmp_path / "corpus", options(0))
    found = examples_of(tmp_path / "corpus")
    assert len(found["heldout"]) in (1, 2)
    assert len(found["train"]) + len(found["heldout"]) == 3
    one: list[Record] = [{"query": "q", "positive": SENTENCES[i]} for i in range(5)]
    with pytest.raises(InputError, match=r"\b5 examples\b"):
        build(write_lines(tmp_path / "one" / "a.jsonl", one).parent, tmp_path / "none", options(0))


def test_a_corpus_is_read_as_what_it_is(corpus: Path, tmp_path: Path) -> None:
    pairs = open_corpus(str(corpus)).manifest
    check_corpus_kind(pairs, "c", TextPairs(packing="pairs", negatives=1))
    for packed in (PackedInput(packing="full_sentences"), RepeatedSentences(packing="sentences")):
        with pytest.raises(CorpusError, match=r"c\b.*\bpairs\b.*input\.packing"):
            check_corpus_kind(pairs, "c", packed)
    with pytest.raises(CorpusError, match=r"\b2 negatives\b.*input\.negatives.*\b3\b"):
        check_corpus_kind(pairs, "c", TextPairs(packing="pairs", negatives=3))
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("\n\n".join(DOCUMENTS[:4]))
    text = build(tmp_path / "in", tmp_path / "text", BuildOptions(txt_documents="blank_line"))
    check_corpus_kind(text, "c", RepeatedSentences(packing="sentences"))
    with pytest.raises(CorpusError, match=r"c\b.*\btext\b.*input\.packing pairs"):
        check_corpus_kind(text, "c", TextPairs(packing="pairs"))
    assert b'"pairs"' not in dump_manifest(text)


def test_the_manifest_says_pairs_and_its_fingerprint_too(corpus: Path) -> None:
    manifest = open_corpus(str(corpus)).manifest
    again = parse_manifest(dump_manifest(manifest), open_store("here"))
    assert again.pairs == PairTexts(2)
    assert again.fingerprint == manifest.fingerprint
    assert len({manifest.fingerprint, *(replace(manifest, pairs=p).fingerprint for p in (None, PairTexts(1)))}) == 3


@given(st.lists(st.text(), min_size=2, max_size=4), st.lists(st.text(), min_size=2, max_size=4))
def test_hashes_tell_examples_apart_and_keep_queries_together(left: list[str], right: list[str]) -> None:
    """Where the first halves agree, the texts do, but for white space around lines; the second are of the query."""
    ours, theirs = hash_texts(left), hash_texts(right)
    if ours[:8] == theirs[:8]:
        assert ["".join(text.split()) for text in left] == ["".join(text.split()) for text in right]
    assert hash_texts([left[0], *right[1:]])[8:] == ours[8:]
    assert hash_texts(left[:1])[8:] == ours[8:], "a plain document of that text is on the same side"
