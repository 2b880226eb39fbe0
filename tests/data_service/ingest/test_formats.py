"""Tables as input: CSV and TSV, every type of string that Parquet and Arrow have, data sets that were saved to disk."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data_service.errors import InputError
from data_service.ingest.documents import read_documents
from data_service.ingest.inputs import list_inputs
from data_service.ingest.options import MIB, BuildOptions
from data_service.ingest.tasks import plan_splits
from data_service.stream.statistics import corpus_stats
from tests.support.data.raw_text import DOCUMENTS, build

TEXTS = ["One.", "", 'Zwei, "drei"\nund\tvier', "五。", "an 'other'"]
PACKED: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def read(path: Path, options: BuildOptions | None = None) -> list[str]:
    options = options or BuildOptions()
    splits = plan_splits(list_inputs([str(path)]).files, options)
    return [document.text for split in splits for document in read_documents(split, options)]


STRINGS = {
    "string": pa.array(TEXTS, pa.string()),
    "large_string": pa.array(TEXTS, pa.large_string()),
    "string_view": pa.array(TEXTS, pa.string_view()),
    "dictionary": pa.array(TEXTS * 2).dictionary_encode()[: len(TEXTS)],
    "dictionary of large": pa.array(TEXTS, pa.large_string()).dictionary_encode(),
}


@pytest.mark.parametrize("kind", STRINGS)
def test_every_type_of_string_in_parquet_and_arrow(tmp_path: Path, kind: str) -> None:
    table = pa.table({"id": range(len(TEXTS)), "text": STRINGS[kind]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert read(tmp_path / "a.parquet") == TEXTS
    for new_writer in (pa.ipc.new_stream, pa.ipc.new_file):
        with new_writer(str(tmp_path / "a.arrow"), table.schema) as writer:
            writer.write_table(table, max_chunksize=3)
        assert read(tmp_path / "a.arrow") == TEXTS


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_bad_bytes_in_columns_are_replaced_when_asked_for(tmp_path: Path, suffix: str) -> None:
    table = pa.table({"text": pa.array([b"a\xffb", b"c"], pa.binary()).cast(pa.string(), safe=False)})
    if suffix == ".parquet":
        pq.write_table(table, tmp_path / "a.parquet")
    else:
        with pa.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
            writer.write_table(table)
    with pytest.raises(InputError, match=rf"a\{suffix}, row 0: byte 1.*UTF-8"):
        read(tmp_path / f"a{suffix}")
    assert read(tmp_path / f"a{suffix}", BuildOptions(on_bad_bytes="replace")) == ["a\ufffdb", "c"]


@pytest.mark.parametrize("name", ["a.json", "a.json.gz", "a.JSON.zst", "a.ndjson", "a.ndjson.gz"])
def test_json_lines_by_other_names(tmp_path: Path, name: str) -> None:
    data = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
    suffix = next((s for s in (".gz", ".zst") if name.endswith(s)), "")
    (tmp_path / name).write_bytes(PACKED[suffix](data))
    assert read(tmp_path / name) == TEXTS


def test_long_integers_beside_the_text_are_nothing_to_it(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": ' + "9" * 5000 + ', "text": "x"}\n{"text": ' + "9" * 5000 + "}\n")
    with pytest.raises(InputError, match=r"line 2\b.*'text'.*\bLongInteger\b"):
        read(tmp_path / "a.jsonl")
    assert read(tmp_path / "a.jsonl", BuildOptions(on_bad_records="skip")) == ["x"]


def save_as_datasets_does(folder: Path, texts: list[str], shards: int = 2) -> None:
    """The layout of `save_to_disk`: streams, and JSON that says which of them are the data."""
    folder.mkdir(parents=True)
    names = [f"data-{shard:05d}-of-{shards:05d}.arrow" for shard in range(shards)]
    for shard, name in enumerate(names):
        table = pa.table({"text": texts[shard::shards], "id": range(len(texts[shard::shards]))})
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")


def test_a_folder_of_a_saved_data_set(tmp_path: Path) -> None:
    save_as_datasets_does(tmp_path / "set/train", TEXTS)
    save_as_datasets_does(tmp_path / "set/test", ["t"], shards=1)
    (tmp_path / "set/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    (tmp_path / "set/train/cache-12ab.arrow").write_bytes(b"what map() keeps for itself")
    assert read(tmp_path / "set") == ["t", *TEXTS[::2], *TEXTS[1::2]]
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
    assert read(tmp_path / "in/set/train") == DOCUMENTS[:40:2]
    build(tmp_path / "in", tmp_path / "corpus", BuildOptions(split_bytes=MIB))
    stats = corpus_stats(str(tmp_path / "corpus"))
    assert stats.counts["documents_read"] == 60
    assert stats.counts["duplicates"] == 20
