"""Tables as input: CSV and TSV, every type of string that Parquet and Arrow have, data sets that were saved to disk."""

import json
import random
from itertools import accumulate, groupby
from pathlib import Path

import pyarrow as pa
import pytest

from data_service.corpus.provenance import ProvenanceOptions
from data_service.errors import InputError
from data_service.ingest.inputs import list_inputs
from data_service.ingest.options import MIB, BuildOptions, PairFields
from data_service.ingest.records import BadRecord, TextRecord
from data_service.stream.statistics import corpus_stats
from tests.support.data.raw_text import DOCUMENTS, build
from tests.support.data.text_files import PACKED, records_of, texts_of, write_table

TEXTS = ["One.", "", 'Zwei, "drei"\nund\tvier', "五。", "łódź 😀"]
ENCODED = [text.encode() for text in TEXTS]

STRINGS = {
    "string": pa.array(TEXTS, pa.string()),
    "large_string": pa.array(TEXTS, pa.large_string()),
    "string_view": pa.array(TEXTS, pa.string_view()),
    "dictionary": pa.array(TEXTS * 2).dictionary_encode()[: len(TEXTS)],
    "dictionary of large": pa.array(TEXTS, pa.large_string()).dictionary_encode(),
    **{str(kind): pa.array(ENCODED).cast(kind) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())},
    "dictionary of bytes": pa.array(ENCODED).cast(pa.dictionary(pa.int8(), pa.binary())),
}


@pytest.mark.parametrize("kind", STRINGS)
def test_every_type_of_string_in_parquet_and_arrow(tmp_path: Path, kind: str) -> None:
    table = pa.table({"id": range(len(TEXTS)), "text": STRINGS[kind]})
    assert texts_of(write_table(tmp_path / "a.parquet", table, 2)) == TEXTS
    for with_footer in (False, True):
        assert texts_of(write_table(tmp_path / "a.arrow", table, 3, with_footer=with_footer)) == TEXTS


def encoded_column(drawn: random.Random, texts: list[str | None], kind: str, plain: pa.DataType) -> pa.Array:
    """Return a column of the texts as a dictionary, as runs, or as runs of numbers in a dictionary."""
    runs = [(text, len(list(same))) for text, same in groupby(texts)]
    values = texts if kind == "dictionary" else [text for text, _ in runs]
    distinct: list[str | None] = [*{text for text in values if text is not None}]
    drawn.shuffle(distinct)
    numbers = pa.array([None if text is None else distinct.index(text) for text in values], pa.int16())
    column = pa.DictionaryArray.from_arrays(numbers, pa.array(distinct).cast(plain))
    if kind == "dictionary":
        return column
    ends = pa.array(accumulate(length for _, length in runs), pa.int32())
    return pa.RunEndEncodedArray.from_arrays(ends, pa.array(values).cast(plain) if kind == "runs" else column)


@pytest.mark.parametrize("kind", ["dictionary", "runs", "runs of a dictionary"])
@pytest.mark.parametrize("plain", ["string", "large_string", "string_view", "binary_view"])
def test_every_type_of_string_in_dictionaries_and_runs(tmp_path: Path, kind: str, plain: str) -> None:
    """As the column of texts, of licences, and in lists of negatives."""
    drawn = random.Random(23)
    options = BuildOptions(provenance=ProvenanceOptions(licence="licence", may_lack=("licence",)))
    texts: list[str | None] = [drawn.choice(TEXTS) for _ in range(700)]
    licences: list[str | None] = [drawn.choice(["MIT", "CC0", None]) for _ in texts]
    columns = [encoded_column(drawn, column, kind, getattr(pa, plain)()) for column in (texts, licences)]
    table = pa.table({"text": columns[0], "licence": columns[1]})
    made = records_of(write_table(tmp_path / "a.arrow", table, 600, with_footer=True), options)
    assert [document.text for document in made if isinstance(document, TextRecord)] == texts
    known = [document.provenance for document in made if isinstance(document, TextRecord)]
    found = [provenance.licence if provenance else None for provenance in known]
    assert found == [licence if text else None for text, licence in zip(texts, licences, strict=True)]
    if kind != "dictionary":
        return
    fields = PairFields(query="text", positive="text", negatives=("others",), count=1)
    pairs = BuildOptions(pairs=fields, on_bad_records="skip")
    lists = pa.ListArray.from_arrays(range(0, len(texts) + 1, 2), columns[0])
    table = pa.table({"text": ["query"] * len(lists), "others": lists})
    examples = records_of(write_table(tmp_path / "a.arrow", table, 500), pairs)
    full = [[text for text in texts[at : at + 2] if text] for at in range(0, len(texts), 2)]
    negatives = [example.others[1] for example in examples if isinstance(example, TextRecord)]
    assert negatives == [both[0] for both in full if both]


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_bad_bytes_in_columns_are_replaced_when_asked_for(tmp_path: Path, suffix: str) -> None:
    table = pa.table({"text": pa.array([b"a\xffb", b"c"], pa.binary()).cast(pa.string(), safe=False)})
    path = write_table(tmp_path / f"a{suffix}", table)
    with pytest.raises(InputError, match=rf"a\{suffix}, row 0: byte 1.*UTF-8") as raised:
        texts_of(path)
    assert "--encoding" not in raised.value.remedy  # which says nothing of columns
    assert texts_of(path, on_bad_bytes="replace") == ["a\ufffdb", "c"]
    assert [type(record) for record in records_of(path, on_bad_records="skip")] == [BadRecord, TextRecord]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.JSON.zst", "a.ndjson", "a.ndjson.gz"])
def test_json_lines_by_other_names(tmp_path: Path, name: str) -> None:
    data = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    suffix = next((s for s in (".gz", ".zst") if name.endswith(s)), "")
    (tmp_path / name).write_bytes(PACKED[suffix](data))
    assert texts_of(tmp_path / name) == TEXTS


def save_as_datasets_does(folder: Path, texts: list[str], shards: int = 2) -> None:
    """The layout of `save_to_disk`: streams, and JSON that says which of them are the data."""
    folder.mkdir(parents=True)
    names = [f"data-{shard:05d}-of-{shards:05d}.arrow" for shard in range(shards)]
    for shard, name in enumerate(names):
        table = pa.table({"text": texts[shard::shards], "id": range(len(texts[shard::shards]))})
        write_table(folder / name, table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_folder_of_a_saved_data_set(tmp_path: Path) -> None:
    save_as_datasets_does(tmp_path / "set/train", TEXTS)
    save_as_datasets_does(tmp_path / "set/test", ["t"], shards=1)
    (tmp_path / "set/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "set/train/cache-12ab.arrow").write_bytes(b"what map() keeps for itself")
    assert texts_of(tmp_path / "set") == ["t", *TEXTS[::2], *TEXTS[1::2]]
    reasons = {Path(item.uri).name: item.reason for item in list_inputs([str(tmp_path / "set")]).left_out}
    assert set(reasons) == {"cache-12ab.arrow", "dataset_dict.json", "dataset_info.json", "state.json"}
    assert "state.json" in reasons["cache-12ab.arrow"]


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ("{", "not the state of a saved data set"),
        ('{"_data_files": 3}', "not the state of a saved data set"),
        ('{"_data_files": [{"filename": "gone.arrow"}]}', r"file gone\.arrow is missing"),
        ('{"_data_files": [], "_indices_data_files": [{"filename": "i.arrow"}]}', "a choice of rows"),
    ],
)
def test_a_data_set_that_cannot_be_read_as_it_is(tmp_path: Path, state: str, problem: str) -> None:
    save_as_datasets_does(tmp_path / "set", TEXTS)
    (tmp_path / "set/state.json").write_text(state)
    with pytest.raises(InputError, match=problem):
        list_inputs([str(tmp_path / "set")])


@pytest.mark.long
def test_what_datasets_itself_saves(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_dict({"text": DOCUMENTS[:40], "n": list(range(40))})
    chosen = whole.filter(lambda row: row["n"] % 2 == 0, keep_in_memory=True)
    datasets.DatasetDict({"train": chosen, "more": whole}).save_to_disk(tmp_path / "in/set")
    assert texts_of(tmp_path / "in/set/train") == DOCUMENTS[:40:2]
    build(tmp_path / "in", tmp_path / "corpus", BuildOptions(split_bytes=MIB))
    stats = corpus_stats(str(tmp_path / "corpus"))
    assert stats.counts["documents_read"] == 60
    assert stats.counts["duplicates"] == 20
