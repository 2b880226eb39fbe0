"""Provenance: the same from every format, whatever the workers and deaths; what is lacking or twice is refused, and
what `only` does not choose is counted."""

import random
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from fnmatch import fnmatchcase
from pathlib import Path

import pyarrow as pa
import pytest

from data_service.corpus.corpus import SPLITS, open_corpus, show_documents, verify_corpus
from data_service.corpus.manifest_file import dump_manifest, parse_manifest
from data_service.corpus.provenance import Provenance, ProvenanceOptions
from data_service.corpus.reader import read_block
from data_service.corpus.sidecar import count_text_by_field, find_documents, origins_in_ranges
from data_service.errors import CorpusError, InputError
from data_service.ingest.options import BuildOptions, PairFields
from data_service.ingest.records import TextRecord
from data_service.store.open import open_store
from tests.support.data import raw_text
from tests.support.data.raw_text import SMALL, Killed, build, files_of, killed_at, origins_of
from tests.support.data.text_files import records_of, write_lines, write_table

DOCUMENTS = raw_text.DOCUMENTS[:40]
Record = dict[str, object]
CONSTANT = {"link": "https://example.org", "license": "MIT", "day": "2024"}
NAMED = ProvenanceOptions(id="docid", url="link", licence="license", date="day")

HERE = open_store("here")


def options(provenance: ProvenanceOptions = NAMED, **more: object) -> BuildOptions:
    return SMALL.model_copy(update={"provenance": provenance, **more})


def records() -> list[Record]:
    """A record for each document, with copies of the first three at the end, which have their ids."""
    made: list[Record] = [
        {
            "docid": f"doc-{number}",
            "text": text,
            "link": f"https://example.org/{number}",
            "license": ("CC0-1.0", "MIT", "CC-BY-4.0")[number % 3],
            "day": f"2024-01-{1 + number % 28:02d}",
        }
        for number, text in enumerate(DOCUMENTS)
    ]
    return made + made[:3]


@pytest.mark.long
def test_every_document_has_a_row_with_its_place(tmp_path: Path) -> None:
    made = records()
    write_lines(tmp_path / "in" / "a.jsonl", made)
    build(tmp_path / "in", tmp_path / "corpus", options())
    corpus = open_corpus(str(tmp_path / "corpus"))
    tokenizer, by_id = corpus.tokenizer(), {record["docid"]: record for record in made}
    seen: list[str | None] = []
    for split in SPLITS:
        table = corpus.table(split)
        blocks = {index: read_block(corpus.store, table, index) for index in range(len(table))}
        rows = list(origins_of(open_corpus(str(tmp_path / "corpus")), split))
        assert len(rows) == table.documents.sum()
        for row in rows:
            block = blocks[row.block]
            first, last = block.sentences[block.documents[row.document : row.document + 2]]
            assert (row.start, row.tokens, row.shard) == (
                first,
                last - first,
                table.block_shard_key(row.block),
            )
            record = by_id[row.provenance.id]
            assert row.provenance == Provenance(
                str(record["docid"]),
                None,
                str(record["link"]),
                str(record["license"]),
                None,
                str(record["day"]),
            )
            text = tokenizer.decode(block.tokens[first:last])
            assert " ".join(text.split())[:80] == " ".join(str(record["text"]).split())[:80]
        seen += [row.provenance.id for row in rows]
    assert sorted(map(str, seen)) == sorted(map(str, by_id))  # a copy has no row of its own


@pytest.mark.long
def test_documents_are_found_counted_and_told_of_a_row(tmp_path: Path) -> None:
    made = records()
    write_lines(tmp_path / "in" / "a.jsonl", made)
    manifest = build(tmp_path / "in", tmp_path / "corpus", options())
    corpus, uri = open_corpus(str(tmp_path / "corpus")), str(tmp_path / "corpus")
    for number in (0, 7, 39):
        (found,) = find_documents(corpus, id=f"doc-{number}")
        assert [found] == list(find_documents(corpus, url=f"https://example.org/{number}"))
        (shown,) = show_documents(uri, found.split, found.number)
        place = (found.origin.shard, found.origin.block, found.origin.document, found.origin.tokens)
        assert place == (shown.shard, shown.block, shown.document, shown.tokens)
        inside = range(found.origin.start + 1, found.origin.start + 2)
        assert origins_in_ranges(corpus, found.split, found.origin.block, [inside]) == [found.origin]
    assert not list(find_documents(corpus, id="doc"))
    counted = count_text_by_field(corpus, "licence")
    assert set(counted) == {"CC0-1.0", "MIT", "CC-BY-4.0"}
    for split in SPLITS:
        table = corpus.table(split)
        assert sum(parts[split].documents for parts in counted.values()) == table.documents.sum()
        assert sum(parts[split].tokens for parts in counted.values()) == table.tokens.sum()
    (tmp_path / "corpus" / next(iter(manifest.provenance))).write_bytes(b"")
    with pytest.raises(CorpusError, match="provenance/"):
        count_text_by_field(corpus, "licence")
    build(tmp_path / "in", tmp_path / "plain", SMALL)
    with pytest.raises(CorpusError, match="--provenance"):
        count_text_by_field(open_corpus(str(tmp_path / "plain")), "licence")


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.csv", "a.parquet", "a.arrow"])
def test_every_format_says_the_same(tmp_path: Path, name: str) -> None:
    made, path = records()[:5], tmp_path / name
    columns = {key: [record[key] for record in made] for key in made[0]}
    table = pa.table(columns | {"day": [date.fromisoformat(str(day)) for day in columns["day"]]})
    match path.suffix:
        case ".parquet" | ".arrow":
            write_table(path, table)
        case ".csv":
            pa_csv = pytest.importorskip("pyarrow.csv")
            pa_csv.write_csv(table, path)
        case _:
            write_lines(path, made)
    found = [record.provenance for record in records_of(path, options()) if isinstance(record, TextRecord)]
    assert found == [
        Provenance(
            f"doc-{i}",
            None,
            f"https://example.org/{i}",
            str(made[i]["license"]),
            None,
            f"2024-01-{i + 1:02d}",
        )
        for i in range(5)
    ]


def test_numbers_are_ids(tmp_path: Path) -> None:
    chosen = options(ProvenanceOptions(id="n"))
    for path in (tmp_path / "a.jsonl", tmp_path / "b.parquet"):
        if path.suffix == ".jsonl":
            write_lines(path, [{"n": 7, "text": "seven"}])
        else:
            write_table(path, pa.table({"n": [7], "text": ["seven"]}))
        (record,) = records_of(path, chosen)
        assert isinstance(record, TextRecord)
        assert record.provenance == Provenance("7")


@pytest.mark.long
def test_workers_write_the_same_bytes(tmp_path: Path) -> None:
    write_lines(tmp_path / "in" / "a.jsonl.gz", records())
    others: list[Record] = [{"docid": f"b{number}", "text": f"{number} b", **CONSTANT} for number in range(50)]
    write_lines(tmp_path / "in" / "b.jsonl", others)
    build(tmp_path / "in", tmp_path / "one", options())
    build(tmp_path / "in", tmp_path / "two", options(workers=2))
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")


@pytest.mark.long
def test_shards_are_those_of_a_corpus_without(tmp_path: Path) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", records())
    plain = build(tmp_path / "in", tmp_path / "plain", SMALL)
    known = build(tmp_path / "in", tmp_path / "known", options())
    assert plain.fingerprint == known.fingerprint
    assert not plain.provenance
    with_sidecars, without = files_of(tmp_path / "known"), files_of(tmp_path / "plain")
    assert {key for key in with_sidecars if key not in without} == set(known.provenance)
    assert all(with_sidecars[key] == data for key, data in without.items() if key != "manifest.json")
    assert b"provenance" not in without["manifest.json"]
    assert all(b'"version":6,' in files["manifest.json"][:60] for files in (without, with_sidecars))
    raised = without["manifest.json"].replace(b'"version":6', b'"version":5', 1)
    with pytest.raises(CorpusError, match="damaged"):
        parse_manifest(raised, HERE)
    assert dump_manifest(parse_manifest(with_sidecars["manifest.json"], HERE)) == with_sidecars["manifest.json"]


def _without(name: str) -> Callable[[Record], Record]:
    return lambda record: {key: value for key, value in record.items() if key != name}


@pytest.mark.parametrize(
    ("spoil", "problem"),
    [
        (_without("license"), "no licence"),
        (lambda record: {**record, "license": None}, "no licence"),
        (lambda record: {**record, "license": "  "}, "no licence"),
        (lambda record: {**record, "license": ["MIT"]}, "'license'"),
        (lambda record: {**record, "docid": 1.5}, "'docid'"),
        (lambda record: {**record, "link": "\ud800"}, "'link'"),
    ],
)
def test_what_a_record_lacks_is_refused_by_place(
    tmp_path: Path, spoil: Callable[[Record], Record], problem: str
) -> None:
    made = records()
    made[4] = spoil(made[4])
    path = write_lines(tmp_path / "in" / "a.jsonl", made)
    with pytest.raises(InputError, match=problem) as refused:
        build(tmp_path / "in", tmp_path / "corpus", options())
    assert f"{path}, line 5" in str(refused.value)
    assert "may_lack" in refused.value.remedy
    manifest = build(tmp_path / "in", tmp_path / "skipped", options(on_bad_records="skip"))
    assert manifest.counts["skipped"] == 1
    assert "line 5" in manifest.skipped[0]


def test_a_lacking_licence_is_allowed_where_that_is_said(tmp_path: Path) -> None:
    made = [record if number % 2 else _without("license")(record) for number, record in enumerate(records())]
    write_lines(tmp_path / "in" / "a.jsonl", made)
    allowed = NAMED.model_copy(update={"may_lack": ("licence",)})
    build(tmp_path / "in", tmp_path / "corpus", options(allowed))
    found = [row.provenance.licence for row in origins_of(open_corpus(str(tmp_path / "corpus")))]
    assert {None, "MIT"} <= set(found)


@pytest.mark.long
def test_constants_stand_for_whole_inputs(tmp_path: Path) -> None:
    write_lines(tmp_path / "in" / "wiki" / "a.jsonl", records()[:20])
    for number, text in enumerate(DOCUMENTS[20:]):
        (tmp_path / "in" / f"note-{number}.txt").write_text(text)
    chosen = ProvenanceOptions.model_validate(
        {
            "id": "docid",
            "may_lack": ["id"],
            "constants": [
                {"inputs": "*/wiki/*", "source": "wiki", "licence": "CC-BY-SA-4.0"},
                {"licence": "CC0-1.0", "source": "notes", "language": "en"},
            ],
        }
    )
    build(tmp_path / "in", tmp_path / "corpus", options(chosen))
    found = {row.provenance._replace(id=None) for row in origins_of(open_corpus(str(tmp_path / "corpus")))}
    assert found == {
        Provenance(source="wiki", licence="CC-BY-SA-4.0", language="en"),
        Provenance(source="notes", licence="CC0-1.0", language="en"),
    }
    nowhere = ProvenanceOptions.model_validate({"constants": [{"inputs": "*/wikipedia/*", "licence": "MIT"}]})
    with pytest.raises(InputError, match="wikipedia"):
        build(tmp_path / "in", tmp_path / "other", options(nowhere))


@pytest.mark.long
@pytest.mark.parametrize(("name", "places"), [("a.jsonl", (3, 9)), ("a.jsonl.gz", (4, 39))])
def test_an_id_twice_is_refused_by_both_places(tmp_path: Path, name: str, places: tuple[int, int]) -> None:
    made = records()
    made[places[1]]["docid"] = made[places[0]]["docid"]
    path = write_lines(tmp_path / "in" / name, made)
    with pytest.raises(InputError, match=f"doc-{places[0]}") as refused:
        build(tmp_path / "in", tmp_path / "corpus", options(split_bytes=20_000))
    assert [f"line {place + 1}" in refused.value.problem for place in places] == [True, True]
    write_lines(path, records())
    build(tmp_path / "in", tmp_path / "corpus", options(split_bytes=20_000))
    assert not verify_corpus(str(tmp_path / "corpus")).damage


@pytest.mark.long
def test_provenance_that_changes_makes_another_corpus(tmp_path: Path) -> None:
    """Also if the text and all sizes stay."""
    made = records()
    path = write_lines(tmp_path / "in" / "a.jsonl", made)
    folder = tmp_path / "corpus"
    with pytest.raises(Killed):
        build(tmp_path / "in", folder, options(), killed_at("assembling", 1))
    made[0]["license"], made[1]["license"] = made[1]["license"], made[0]["license"]
    made[0], made[1] = dict(made[0]), dict(made[1])
    write_lines(path, [*made[:-3], *records()[-3:]])
    build(tmp_path / "in", folder, options())
    build(tmp_path / "in", tmp_path / "fresh", options())
    ours, fresh = files_of(folder), files_of(tmp_path / "fresh")
    assert ours.keys() == fresh.keys()
    assert all(ours[key] == fresh[key] for key in ours if key.startswith("provenance"))
    write_lines(path, records())
    with pytest.raises(CorpusError, match="changed"):
        build(tmp_path / "in", folder, options())


@pytest.mark.long
def test_stretches_and_pairs_have_provenance(tmp_path: Path) -> None:
    long = "\n\n".join(DOCUMENTS)
    write_lines(tmp_path / "long" / "a.jsonl", [{"docid": "one", "text": long}, {"docid": "two", "text": long[::-1]}])
    chosen = options(ProvenanceOptions(id="docid"))
    manifest = build(tmp_path / "long", tmp_path / "stretches", chosen)
    assert manifest.heldout_rule is not None
    assert manifest.heldout_rule.unit == "stretch"
    stretches = open_corpus(str(tmp_path / "stretches"))
    for split in SPLITS:
        assert {row.provenance.id for row in origins_of(stretches, split)} <= {"one", "two"}
    rows = list(origins_of(stretches))
    assert len(rows) == manifest.train.documents.sum() > 2

    pairs: list[Record] = [
        {"docid": str(i), "query": text[:60], "positive": text[60:200]} for i, text in enumerate(DOCUMENTS)
    ]
    write_lines(tmp_path / "pairs" / "a.jsonl", pairs)
    manifest = build(tmp_path / "pairs", tmp_path / "examples", chosen.model_copy(update={"pairs": PairFields()}))
    assert len(list(origins_of(open_corpus(str(tmp_path / "examples"))))) == manifest.train.documents.sum()


def test_a_manifest_may_not_name_other_sidecars(tmp_path: Path) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", records())
    manifest = build(tmp_path / "in", tmp_path / "corpus", options())
    sidecar = next(iter(manifest.provenance))
    (tmp_path / "corpus" / sidecar).unlink()
    (damage,) = verify_corpus(str(tmp_path / "corpus")).damage
    assert damage.key == sidecar
    fewer = replace(manifest, provenance={k: v for k, v in manifest.provenance.items() if k != sidecar})
    with pytest.raises(CorpusError, match="sidecars"):
        parse_manifest(dump_manifest(fewer), HERE)


def matches(value: str | None, pattern: str) -> bool:
    """A pattern with stars, by the shell's rule for these alone."""
    return value is not None and fnmatchcase(value.lower(), pattern.lower().replace("[", "[[]"))


@pytest.mark.parametrize("seed", range(3))
def test_only_chosen_licences_and_sources_are_kept(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    licences = ("MIT", "CC-BY-4.0", "cc-by-sa 3", "CC0", "own [1]\nline", None)
    made: list[Record] = [
        {"docid": f"d{n}", "text": text, "license": draw.choice(licences), "from": draw.choice("abc")}
        for n, text in enumerate(DOCUMENTS)
    ]
    write_lines(tmp_path / "in" / "a.jsonl", made)
    patterns = {
        "licence": [*draw.sample(["mit", "cc-by*", "*0", "own [1]*", "nothing"], 2), "CC-BY-4.0"],
        "source": draw.sample(["a", "B", "c*"], 2),
    }
    chosen = ProvenanceOptions.model_validate(
        {"id": "docid", "licence": "license", "source": "from", "may_lack": ["licence"], "only": patterns}
    )
    expected = {
        record["docid"]
        for record in made
        if any(matches(record["license"], one) for one in patterns["licence"])  # type: ignore[arg-type]
        and any(matches(str(record["from"]), one) for one in patterns["source"])
    }
    manifest = build(tmp_path / "in", tmp_path / "corpus", SMALL.model_copy(update={"provenance": chosen}))
    corpus = open_corpus(str(tmp_path / "corpus"))
    kept = {row.provenance.id for split in SPLITS for row in origins_of(corpus, split)}
    assert kept == expected
    assert manifest.counts["not_chosen"] == len(made) - len(expected)
    assert manifest.counts["documents_read"] == len(made)


def test_a_choice_that_leaves_nothing_is_said(tmp_path: Path) -> None:
    write_lines(tmp_path / "in" / "a.jsonl", [{"text": text, "license": "MIT"} for text in DOCUMENTS])
    none = ProvenanceOptions.model_validate({"licence": "license", "only": {"licence": ["gpl"]}})
    with pytest.raises(InputError, match=f"{len(DOCUMENTS)} that `only`"):
        build(tmp_path / "in", tmp_path / "corpus", SMALL.model_copy(update={"provenance": none}))
    with pytest.raises(ValueError, match="source"):
        ProvenanceOptions.model_validate({"licence": "license", "only": {"source": ["web"]}})
