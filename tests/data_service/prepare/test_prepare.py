"""Documents in, documents out: each is kept or dropped for one reason, with what the input says of it."""

import gzip
import json
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_service.errors import InputError, PrepareError
from data_service.ingest.inputs import list_inputs
from data_service.prepare.documents import Document
from data_service.prepare.stages import Licence
from tests.support.data.preparations import rows_of, run, write_lines
from tests.support.data.raw_text import DOCUMENTS, build, files_of
from tests.support.faults.process import dies_at

LENGTH = {"stage": "length", "least_characters": 400}
EXACT = {"stage": "exact_duplicates"}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """JSON lines with everything said of each, a table with dates and numbers, texts without fields."""
    folder = tmp_path_factory.mktemp("inputs")
    texts = [text[:900] for text in DOCUMENTS]
    records: list[dict[str, Any]] = [
        {"text": text, "id": f"n{i}", "url": f"https://x.example/{i}", "licence": "CC0" if i % 2 else None}
        for i, text in enumerate([*texts[:60], *texts[20:40], "", "short"])
    ]
    news = write_lines(folder / "news.jsonl", records)
    dates = pa.array([20_000 + i for i in range(40)], pa.date32())
    columns = {"body": texts[30:70], "number": list(range(40)), "day": dates}
    pq.write_table(pa.table(columns), folder / "books.parquet", row_group_size=7)
    (folder / "notes.txt").write_text("\n\n".join(texts[60:75]), "utf-8")
    return [
        news | {"fields": {"id": "id", "url": "url", "licence": "licence"}, "constants": {"language": "en"}},
        {"source": "books", "files": [str(folder / "books.parquet")], "text": "body"}
        | {"fields": {"id": "number", "date": "day"}, "constants": {"licence": "MIT"}},
        {"source": "notes", "files": [str(folder / "notes.txt")], "txt_documents": "blank_line"},
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, sources: list[dict[str, Any]]) -> Path:
    out = tmp_path_factory.mktemp("whole")
    run(sources, [LENGTH, EXACT], out)
    return out


def test_every_document_is_kept_or_dropped_for_one_reason(whole: Path, sources: list[dict[str, Any]]) -> None:
    kept, dropped = rows_of(whole / "documents"), rows_of(whole / "dropped")
    statistics = json.loads((whole / "statistics.json").read_text("utf-8"))
    ids = [row["id"] for row in kept + dropped]
    assert len(ids) == len(set(ids)) == statistics["documents_read"]
    assert statistics["documents_kept"] == len(kept)
    counted = Counter((row["source"], row["stage"], row["reason"]) for row in dropped)
    assert counted == {
        (source, stage, reason): count
        for source, counts in statistics["sources"].items()
        for stage, reasons in counts["dropped"].items()
        for reason, count in reasons.items()
    }
    assert {stage["stage"] for stage in statistics["stages"]} == {"read", "length", "exact_duplicates"}
    assert statistics["stages"][-1]["left"] == len(kept)


def test_a_document_keeps_what_the_input_says_of_it(whole: Path) -> None:
    kept = {row["id"]: row for row in rows_of(whole / "documents")}
    assert kept["n1"]["url"] == "https://x.example/1"
    assert (kept["n1"]["licence"], kept["n1"]["language"], kept["n1"]["date"]) == ("CC0", "en", None)
    assert kept["n2"]["licence"] is None
    book = next(row for row in kept.values() if row["source"] == "books")
    assert (book["licence"], book["date"][:4], book["id"].isdigit()) == ("MIT", "2024", True)
    assert any(name.startswith("notes/notes.txt:byte-") for name in kept)


@pytest.mark.long
def test_licences_are_kept_as_they_are_counted(sources: list[dict[str, Any]], tmp_path: Path) -> None:
    """Those of the inputs: CC0, none, and what others say; whatever case the patterns have."""
    read = run(sources, [], tmp_path / "all").licences
    stage = {"stage": "licence", "allowed": ["cc*"]}
    kept = run(sources, [stage], tmp_path / "kept")
    assert kept.licences == {name: count for name, count in read.items() if name.lower().startswith("cc")}
    assert kept.licences
    dropped = kept.stages[-1].dropped
    assert dropped.get("unstated", 0) == read.get("", 0)
    assert sum(dropped.values()) + kept.documents_kept == sum(read.values())
    stage["unstated"] = "keep"
    assert run(sources, [stage], tmp_path / "more").licences == {
        name: count for name, count in read.items() if not name or name.lower().startswith("cc")
    }


PLAIN = st.text("aA.[]?-é\n", max_size=4)


@given(st.lists(PLAIN, min_size=1, max_size=3), st.lists(PLAIN, min_size=4, max_size=4), PLAIN)
def test_a_pattern_of_licences_has_one_sign(parts: list[str], between: list[str], other: str) -> None:
    """`*` is any text, everything else is itself."""
    stage = Licence(stage="licence", allowed=("*".join(parts),))
    fits = parts[0] + "".join(map("".join, zip(between, parts[1:], strict=False)))
    assert isinstance(stage.filter_document(Document("1", "", "s", licence=fits.upper())), Document)
    if len(parts) == 1:
        same = other.lower() == parts[0].lower()
        assert isinstance(stage.filter_document(Document("1", "", "s", licence=other)), Document) == same


def test_of_equal_documents_the_first_is_kept_and_stands_for_all(whole: Path) -> None:
    kept, dropped = rows_of(whole / "documents"), rows_of(whole / "dropped")
    copies = [row for row in dropped if row["stage"] == "exact_duplicates"]
    texts = Counter(row["text"] for row in kept)
    assert copies
    assert set(texts.values()) == {1}
    assert sum(row["cluster_size"] - 1 for row in kept) == len(copies)
    sizes = {row["id"]: row["cluster_size"] for row in kept}
    assert all(sizes[row["detail"].removeprefix("copy of ")] > 1 for row in copies)
    order = {name: place for place, name in enumerate(("news", "books", "notes"))}
    of = {row["id"]: row["source"] for row in kept}
    assert all(order[of[row["detail"].removeprefix("copy of ")]] <= order[row["source"]] for row in copies)


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=st.lists(st.integers(1, 120), min_size=1, max_size=3))
def test_killed_before_any_change_of_a_file_and_continued_it_is_the_same(
    tmp_path_factory: pytest.TempPathFactory, whole: Path, sources: list[dict[str, Any]], calls: list[int]
) -> None:
    out = tmp_path_factory.mktemp("killed") / "out"
    for call in calls:
        dies_at(call, lambda: run(sources, [LENGTH, EXACT], out))
    run(sources, [LENGTH, EXACT], out)
    assert files_of(out) == files_of(whole)


@pytest.mark.parametrize("seed", [1, 3])
def test_preparations_that_alternate_in_one_output_leave_the_last_ones_documents(tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    many = write_lines(tmp_path / "many.jsonl", [{"text": f"text {drawn.randrange(90)} of all"} for _ in range(200)])
    bad = write_lines(tmp_path / "bad.jsonl", [])

    def begin(language: str, out: str) -> None:
        with suppress(InputError):
            run([many | {"constants": {"language": language}}, bad], [{"stage": "length"}], tmp_path / out, chunk=4096)

    language, died = "en", False
    for _ in range(6):
        (tmp_path / "bad.jsonl").write_bytes(b'{"text": "caf\xe9"}\n')
        language = language if died else drawn.choice(["en", "de", "fr"])
        died = dies_at(drawn.choice([0, drawn.randint(1, 60)]), lambda: begin(language, "out"))  # noqa: B023
    (tmp_path / "bad.jsonl").write_bytes(b'{"text": "cafe"}\n')
    language = language if died else drawn.choice(["en", "de", "fr"])
    for out in ("out", "whole"):
        begin(language, out)
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


@pytest.mark.long
def test_datatroves_blocks_and_ours_in_one_preparation(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    for package in ("datatrove", "spacy"):
        pytest.importorskip(package, reason="needs maskfleet[prepare]")
    names = (
        "gopher_repetition",
        "gopher_quality",
        "pii",
        "exact_duplicates",
        "c4_quality",
        "fineweb_quality",
    )
    stages: list[dict[str, Any]] = [{"stage": name} for name in names]
    stages[4]["filter_no_terminal_punct"] = False
    statistics = run(sources, stages, tmp_path / "out")
    assert statistics.documents_kept
    assert sum(sum(stage.dropped.values()) for stage in statistics.stages) + statistics.documents_kept == 212
    assert dies_at(70, lambda: run(sources, stages, tmp_path / "killed"))
    run(sources, stages, tmp_path / "killed")
    assert files_of(tmp_path / "killed") == files_of(tmp_path / "out")


def test_a_missing_model_is_refused_before_anything_is_written(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    stage = {"stage": "language", "model": str(tmp_path / "lid.bin"), "sha256": "0" * 64}
    with pytest.raises(PrepareError, match=r"lid\.bin"):
        run(sources, [LENGTH, stage], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_complete_output_is_known_and_another_preparation_refused(whole: Path, sources: list[dict[str, Any]]) -> None:
    before = files_of(whole)
    assert run(sources, [LENGTH, EXACT], whole).documents_kept == len(rows_of(whole / "documents"))
    with pytest.raises(PrepareError, match="stages"):
        run(sources, [EXACT], whole)
    assert files_of(whole) == before


@pytest.mark.long
def test_a_corpus_is_built_of_what_was_kept_alone(whole: Path, tmp_path: Path) -> None:
    manifest = build(whole, tmp_path / "corpus")
    kept = rows_of(whole / "documents")
    assert manifest.counts["documents_read"] == len(kept)
    listing = list_inputs([str(whole)])
    assert all("/documents/" in file.uri for file in listing.files)


def test_a_half_prepared_output_is_no_input(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    out = tmp_path / "out"
    assert dies_at(60, lambda: run(sources, [LENGTH, EXACT], out))
    with pytest.raises(InputError, match="/out"):
        list_inputs([str(out)])


@pytest.mark.long
def test_a_filter_that_drops_everything_names_what_dropped(tmp_path: Path, sources: list[dict[str, Any]]) -> None:
    stage = {"stage": "length", "least_characters": 10_000}
    with pytest.raises(PrepareError, match=r"length .* too_few_characters"):
        run(sources, [stage], tmp_path / "out")
    assert len(rows_of(tmp_path / "out/dropped")) == 212
    run(sources, [LENGTH], tmp_path / "out")
    assert {row["stage"] for row in rows_of(tmp_path / "out/dropped")} == {"read", "length"}
    assert not (tmp_path / "out/build").exists()


def test_ids_twice_name_the_id_and_both_places(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "one.jsonl", [{"text": f"text {i}", "id": i} for i in range(5)])
    two = write_lines(tmp_path / "two.jsonl", [{"text": f"other {i}", "id": i + 4} for i in range(5)])
    with pytest.raises(InputError, match=r"'4': .*one\.jsonl, line 5.* .*two\.jsonl, line 1"):
        run([one | {"fields": {"id": "id"}}, two | {"fields": {"id": "id"}}], [], tmp_path / "out")


def test_bad_records_are_refused_by_place_or_dropped_with_their_reason(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": "good"}, {"text": "bad", "lang": ["x"]}, {"body": 1}])
    named = source | {"fields": {"language": "lang"}}
    with pytest.raises(InputError, match="line 2"):
        run([named], [], tmp_path / "out")
    statistics = run([named | {"on_bad_records": "skip"}], [], tmp_path / "out")
    assert statistics.stages[0].dropped == {"bad_record": 2}
    assert [row["id"].rpartition("/")[2] for row in rows_of(tmp_path / "out/dropped")] == [
        "a.jsonl:byte-17",
        "a.jsonl:byte-48",
    ]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"fields": {"id": "name"}}, "name"),
        ({"files": ["nowhere.jsonl"]}, r"nowhere\.jsonl"),
    ],
)
def test_inputs_that_are_not_there(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    path = tmp_path / "a.csv"
    path.write_text("text,id\nsome,1\n")
    with pytest.raises(InputError, match=match):
        run([{"source": "a", "files": [str(path)], **change}], [], tmp_path / "out")


def test_a_file_of_two_sources_and_an_output_of_inputs_are_refused(tmp_path: Path) -> None:
    one = write_lines(tmp_path / "in/a.jsonl", [{"text": "a"}])
    with pytest.raises(InputError, match=r"a\.jsonl .* 'a' .* 'b'"):
        run([one, one | {"source": "b"}], [], tmp_path / "out")
    with pytest.raises(InputError, match=r"in .*a\.jsonl"):
        run([one], [], tmp_path / "in")


@pytest.mark.long
def test_big_packed_files_are_read_in_chunks(tmp_path: Path) -> None:
    drawn = random.Random(1)
    texts = ["".join(drawn.choices("abcdefgh ", k=300)) for _ in range(600)]
    lines = "".join(json.dumps({"text": text, "id": f"d{i}"}) + "\n" for i, text in enumerate([*texts, texts[0]]))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    source = {"source": "a", "files": [str(tmp_path / "a.jsonl.gz")], "fields": {"id": "id"}}
    statistics = run([source], [EXACT], tmp_path / "out")
    assert len(statistics.parts) > 10
    assert [row["text"] for row in rows_of(tmp_path / "out/documents")] == texts


@pytest.mark.parametrize("packed", [False, True])
def test_a_complete_output_refuses_an_edit_of_the_same_size_and_takes_the_same_text(
    tmp_path: Path, packed: bool
) -> None:
    drawn = random.Random(packed)
    records = [{"text": f"text {drawn.random()}", "of": drawn.choice(["MIT", "CC0"])} for _ in range(300)]
    source = write_lines(tmp_path / "a.jsonl", records) | {"fields": {"licence": "of"}}
    content = (tmp_path / "a.jsonl").read_bytes()
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    source["files"] = [str(path)]

    def write(data: bytes) -> None:
        path.write_bytes(gzip.compress(data, 0) if packed else data)

    write(content)
    run([source], [EXACT], tmp_path / "out", chunk=4096)
    before = files_of(tmp_path / "out")
    write(content)
    run([source], [EXACT], tmp_path / "out", chunk=4096)
    at = drawn.choice([place for place in range(len(content)) if content.startswith(b"MIT", place)])
    for edited in (content.replace(b"text 0.1", b"text 0.2"), content[:at] + b"GPL" + content[at + 3 :]):
        write(edited)
        with pytest.raises(PrepareError, match=rf"/out .*/{path.name}"):
            run([source], [EXACT], tmp_path / "out", chunk=4096)
    write(b"\xff" + content[1:])
    with pytest.raises(InputError, match=path.name):
        run([source], [EXACT], tmp_path / "out", chunk=4096)
    assert files_of(tmp_path / "out") == before


def test_a_changed_input_of_the_same_size_is_read_again(tmp_path: Path) -> None:
    source = write_lines(tmp_path / "a.jsonl", [{"text": f"text {i}", "id": i} for i in range(3)])
    source |= {"fields": {"id": "id"}}
    assert dies_at(25, lambda: run([source], [EXACT], tmp_path / "out"))
    write_lines(tmp_path / "a.jsonl", [{"text": f"next {i}", "id": i} for i in range(3)])
    run([source], [EXACT], tmp_path / "out")
    assert [row["text"] for row in rows_of(tmp_path / "out/documents")] == ["next 0", "next 1", "next 2"]


@pytest.mark.long
@settings(max_examples=8, deadline=None)
@given(texts=st.lists(st.sampled_from(["a", "b", "c", "dd", "é"]), min_size=1, max_size=40))
def test_clusters_are_those_of_a_counter(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("clusters")
    source = write_lines(folder / "a.jsonl", [{"text": text} for text in texts])
    run([source], [EXACT, EXACT], folder / "out")
    kept = rows_of(folder / "out/documents")
    assert {row["text"]: row["cluster_size"] for row in kept} == Counter(texts)
    assert [row["text"] for row in kept] == list(dict.fromkeys(texts))
