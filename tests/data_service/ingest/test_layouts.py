"""Layouts that people's data sets have: folders of MDS, caches of `datasets`, hidden files, JSON in archives, nested
fields, columns of bytes, zstd with a long window."""

import base64
import gzip
import json
import random
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data_service.errors import InputError
from data_service.ingest.inputs import list_inputs
from data_service.ingest.records import BadRecord, TextRecord
from tests.support.data.raw_text import DOCUMENTS
from tests.support.data.text_files import records_of, size_and_memory_of_reading, tar_of, texts_of, write_table

# What mosaicml-streaming 0.13.0 writes: two folders of MDSWriter, and merge_index above them; a packed tar.
MERGED = (
    "/Td6WFoAAATm1rRGAgAhARYAAAB0L+Wj4E//Am5dADMbCEhqfw+BQ+69ycpJxo/f0/CG8mxnBZ8shy9/+c2huZZ0cYMm6kWP2ry8"
    "TiaBk+laajtEpCbv/K29DEGAHYkfYKEViqJjJGoXTzcWrJiF+mBYS30fyyJAHZMi+HgmTHNHEMiby//bKudXYSqS5WLTAlUKOCaj"
    "faMxBq2lyNiiFqu65IH9WMGZmQVyF1wVdqeey2sck3JLHEWrVIINokC39XbSGiKDGM8G5AqNTnVIRL/jMslasgRG7tBJdxrz1iqu"
    "POt13k30C8VHPSu5JuZuraoB3qRkw9V1GSatjciXZhHECvymURh0t1Z4JOvh3M368Tk2beQCM6RkaE0sTSYhNURbliehthL1UYN+"
    "u5WFcM/KRWcQftmkWCLh0HT59I7oE/a9LToeULw+dx5AsNn/o9phVnagBDAe8e9inwZRH0C4ZenYAZClMzkhVNYTBNxf3vXQxmFY"
    "9nviRFPfWogerqT8tNmSm6m5TbFAGqdQkWx7m48p971clEuz6EOyxmNhiGjlKSPzMfKztrH2fMcSDAWuOXoWlXYzQiA/crzOXvf+"
    "xp3p3eW7xV714lRO9eETiSDUA/1eTWTccHgFrfDqFx/M7IALeUgABxfUQJddTEiHxEGO3O2utqNuq63v1P2i3ROwqEgCVy4TSNMJ"
    "gnFaKmaYyojUxcPSClVE1RoALwFDNtz+KFi+mDfFBA3/WMfGCQk3X5LW/mG6d7OQZP1AM5/Z1qABl0h+MXYRi14nbfHSB3OaJURE"
    "CkXUqkHSREeUuCyGfa8q00IiOLMz8o5kSUQbrYc/O+kMy8MKMDf4kwM1DP7oR6V/huioOqAAAACvO3nrs4U/ngABigWAoAEACbak"
    "mbHEZ/sCAAAAAARZWg=="
)


def left_out(*patterns: Path | str) -> set[str]:
    return {item.uri.partition("/in/")[2] for item in list_inputs(list(map(str, patterns))).left_out}


@pytest.fixture
def merged(tmp_path: Path) -> Path:
    """By the program tar: Python 3.11.2, Debian's, cannot refuse what leads out of the folder."""
    (tmp_path / "in").mkdir()
    subprocess.run(["tar", "-xJ", "-C", tmp_path / "in"], input=base64.b64decode(MERGED), check=True)
    return tmp_path / "in/flat"


SAID = [f"Document {i} of part {part}: the boat came back to pier {i}." for part in range(2) for i in range(6)]


@pytest.mark.parametrize("own", [True, False])
def test_a_merged_index_above_the_folders_of_its_shards(merged: Path, own: bool) -> None:
    indexes = {"flat/index.json", "flat/part.0/index.json", "flat/part.1/index.json"}
    if not own:
        for path in (merged / "part.0/index.json", merged / "part.1/index.json"):
            path.unlink()
        indexes = {"flat/index.json"}
    assert texts_of(merged) == SAID
    assert left_out(merged) == indexes
    (merged / "part.1/shard.00009.mds").write_bytes(b"of another data set")
    (merged / "part.2").mkdir()  # not of the index: a folder of its own
    (merged / "part.2/a.mds").write_bytes((merged / "part.0/shard.00000.mds").read_bytes())
    assert left_out(merged) == {*indexes, "flat/part.1/shard.00009.mds"}
    assert texts_of(merged) == [*SAID, *SAID[:2]]


def test_a_merged_index_says_what_must_be_there(merged: Path) -> None:
    for path in (merged / "part.0/index.json", merged / "part.1/index.json"):
        path.unlink()
    shard = merged / "part.1/shard.00002.mds"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    with pytest.raises(InputError, match=r"part\.1/shard\.00002\.mds has 394 bytes"):
        list_inputs([str(merged)])
    shard.unlink()
    with pytest.raises(InputError, match=r"part\.1/shard\.00002\.mds:"):
        list_inputs([str(merged)])
    assert texts_of(merged / "part.0") == SAID[:6]  # what the remedy says
    (merged / "index.json").write_text('{"text": "JSON lines"}\n')  # above shards, so it need not be an index
    assert texts_of(merged)[0] == "JSON lines"


@pytest.mark.parametrize("change", ["map", "filter", "shuffle"])
def test_what_datasets_caches_beside_a_data_set_is_no_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    datasets = pytest.importorskip("datasets", reason="needs maskfleet[evaluate]")
    (tmp_path / "d.json").write_text("".join(json.dumps({"text": text}) + "\n" for text in SAID))
    made = datasets.load_dataset(
        "json", data_files=str(tmp_path / "d.json"), split="train", cache_dir=str(tmp_path / "in")
    )
    match change:
        case "map":
            made.map(lambda row: {"text": row["text"].lower()})
        case "filter":
            made.filter(lambda row: "1" in row["text"])
        case "shuffle":
            made.shuffle(seed=1)
    assert list((tmp_path / "in").rglob("cache-*.arrow"))
    assert texts_of(tmp_path / "in") == SAID
    assert {Path(item).name.partition("-")[0] for item in left_out(tmp_path / "in")} >= {"cache"}


def test_hidden_files_are_read_only_if_they_are_named(tmp_path: Path) -> None:
    names = [
        "a.txt",
        "._a.txt",
        ".b.txt",
        "__MACOSX/a.txt",
        ".git/x/c.txt",
        "d/.cache/e.txt",
        "d/f.txt",
        ".git/g.txt",
    ]
    for name in names:
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(name)
    folder = tmp_path / "in"
    assert texts_of(folder) == ["a.txt", "d/f.txt"] == texts_of(f"{folder}/**/*.txt")
    assert left_out(folder) == {"._a.txt", ".b.txt", "__MACOSX/", ".git/", "d/.cache/"}
    for name in names:
        assert texts_of(folder / name) == [name]
    assert sorted(texts_of(folder / ".git")) == [".git/g.txt", ".git/x/c.txt"]
    assert texts_of(f"{folder}/*/.cache/*.txt") == ["d/.cache/e.txt"]
    assert texts_of(folder / "__MACOSX") == ["__MACOSX/a.txt"]


def test_a_string_a_line_is_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(text) + "\n" for text in [*SAID, 'é\n\ud83d\ude00"\u2028']))
    assert texts_of(tmp_path / "a.jsonl") == [*SAID, 'é\n😀"\u2028']
    assert texts_of(tmp_path / "a.jsonl", text_field="body") == [*SAID, 'é\n😀"\u2028']
    (tmp_path / "b.json").write_text('"one"\n{"text": "two"}\n3\n')
    *good, bad = records_of(tmp_path / "b.json", on_bad_records="skip")
    assert [record.text for record in good if isinstance(record, TextRecord)] == ["one", "two"]
    assert isinstance(bad, BadRecord)


def value_at(way: list[str], text: str, draw: random.Random) -> dict[str, Any]:
    """Return an object that holds a text at `way`, among others."""
    inner = value_at(way[1:], text, draw) if way[1:] else text
    more = {f"x{i}": draw.choice([1, "text", ""]) for i in range(draw.randrange(3))}
    return dict(draw.sample(list({**more, way[0]: inner}.items()), len(more) + 1))


@pytest.mark.parametrize("seed", range(8))
def test_fields_inside_others(tmp_path: Path, seed: int) -> None:
    """In JSON lines, Parquet and Arrow; a column of that very name, dots and all, comes first."""
    draw = random.Random(seed)
    way = draw.sample(["meta", "text", "body", "a", "é"], k=draw.randint(2, 4))
    name, shape = ".".join(way), random.Random(seed)
    state = shape.getstate()
    rows = []
    for text in SAID:
        shape.setstate(state)
        rows.append(value_at(way, text, shape))
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pa.Table.from_pylist(rows)
    write_table(tmp_path / "a.parquet", table)
    write_table(tmp_path / "a.arrow", table)
    for suffix in ("jsonl", "parquet", "arrow"):
        assert texts_of(tmp_path / f"a.{suffix}", text_field=name) == SAID
        with pytest.raises(InputError, match=f"a.{suffix}.*{way[0]}"):
            texts_of(tmp_path / f"a.{suffix}", text_field=f"{name}.more")
    plain = table.append_column(name, pa.array([text.upper() for text in SAID]))
    pq.write_table(plain, tmp_path / "b.parquet")
    assert texts_of(tmp_path / "b.parquet", text_field=name) == [text.upper() for text in SAID]


def test_a_field_inside_nothing_is_a_bad_record(tmp_path: Path) -> None:
    rows = [{"meta": {"text": "one"}}, {"meta": None}, {"meta": {"text": None}}, {"meta": {"text": "two"}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for suffix in ("parquet", "jsonl"):
        found = records_of(tmp_path / f"a.{suffix}", text_field="meta.text", on_bad_records="skip")
        assert [record.text if isinstance(record, TextRecord) else None for record in found] == [
            "one",
            None,
            None,
            "two",
        ]


def test_json_in_archives(tmp_path: Path) -> None:
    members = {
        "a.jsonl": b'{"text": "one"}\n\n"two"\n',
        "b.json": json.dumps({"text": "three", "more": [1]}, indent=2).encode(),
        "c.json": b'{"text": "four"}\n{"text": "five"}\n',
        "d.json.gz": gzip.compress(b'"six"'),
        "d.jsonl.zst": zstandard.compress(b'{"text": "seven"}'),
        "e.json": b'{"caption": "what stands beside a picture", "width": 9}',
        "f.txt": b"eight",
        "._g.json": b"\0\5\x16\7",
        "__MACOSX/h.txt": b"\0\5\x16\7",
        "i.json": b"\xff\xfe" + '{"text": "nine"}'.encode("utf-16-le"),
    }
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of(members))
    assert texts_of(path) == ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    absent = [record.absent for record in records_of(path) if isinstance(record, TextRecord) and record.absent]
    assert absent == ["no_text_field", "hidden_file", "hidden_file"]
    deep = {"text": "ten", "meta": {"text": "nested"}}
    inner = tar_of({"z.json": json.dumps(deep, indent=1).encode(), "y.json": b'{"text": "x"}'})
    path.write_bytes(tar_of({"in.tar": inner}))
    assert texts_of(path) == ["ten", "x"]
    assert texts_of(path, text_field="meta.text") == ["nested"]


def test_webdatasets_own_writer(tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as sink:
        for number, text in enumerate(SAID):
            sink.write({"__key__": f"{number:06}", "json": {"text": text, "n": number}, "cls": number})
            sink.write({"__key__": f"x{number:06}", "txt": text, "json": {"width": 1}, "png": b"\x89PNG"})
    assert texts_of(tmp_path / "a.tar") == [text for text in SAID for _ in range(2)]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.jsonl", b'{"text": "one"}\n{"body": "two"}\n', "body"),
        ("a.jsonl", b'{"body": "two"}\n', "body"),
        ("a.json", b"[1, 2]", "not an object"),
        ("a.json", b'{"text": 3}', "int"),
        ("a.json", b'{"text": "cut', "JSON"),
        ("a.jsonl.zst", zstandard.compress(bytes(1 << 20)), "more than"),
    ],
)
def test_broken_json_in_archives_is_a_bad_record(tmp_path: Path, name: str, data: bytes, said: str) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of({name: data, "b.txt": b"good"}))
    *_, bad, good = records_of(path, on_bad_records="skip", max_document_bytes=4096)
    assert isinstance(bad, BadRecord)
    assert said in bad.reason
    assert isinstance(good, TextRecord)


def test_fields_of_json_in_archives(tmp_path: Path) -> None:
    pair = b'{"query": "q", "positive": "p"}\n'
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of({"a.jsonl": pair, "b.jsonl": pair}))
    assert [record.texts for record in records_of(path, pairs={}) if isinstance(record, TextRecord)] == [("q", "p")] * 2
    path.write_bytes(tar_of({"c.txt": b"text"}))
    with pytest.raises(InputError, match=r"a\.tar/c\.txt.*fields"):
        records_of(path, pairs={})


def long_window(data: bytes, log: int = 31) -> bytes:
    """Return what `zstd --long` makes of a pipe, whose size it does not know."""
    wide = zstandard.ZstdCompressionParameters.from_level(3, window_log=log, enable_ldm=True)
    frame = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    return frame.compress(data) + frame.flush()


@pytest.mark.parametrize("log", [28, 31])
def test_long_windows_of_zstd_are_read(tmp_path: Path, log: int) -> None:
    data = "".join(json.dumps({"text": text}) + "\n" for text in DOCUMENTS).encode()
    skipped = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
    whole = long_window(data, log) + skipped + zstandard.compress(data) + skipped
    (tmp_path / "a.jsonl.zst").write_bytes(whole)
    assert texts_of(tmp_path / "a.jsonl.zst") == DOCUMENTS * 2
    frame = long_window(data, log)
    for cut in (20, len(frame) // 2, len(frame) - 1):
        (tmp_path / "a.jsonl.zst").write_bytes(frame[:cut])
        with pytest.raises(InputError, match=r"a\.jsonl\.zst: .*truncated"):
            texts_of(tmp_path / "a.jsonl.zst")
    (tmp_path / "a.jsonl.zst").write_bytes(frame + b"no frame")
    with pytest.raises(InputError, match=r"a\.jsonl\.zst: .*truncated"):
        texts_of(tmp_path / "a.jsonl.zst")


def test_a_long_window_beyond_the_free_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt.zst").write_bytes(long_window(b"text"))
    free = psutil.virtual_memory()._replace(available=3 << 30)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: free)
    with pytest.raises(InputError, match=r"2,048.*3,072") as raised:
        texts_of(tmp_path / "a.txt.zst")
    assert "--long=27" in raised.value.remedy
    (tmp_path / "a.txt.zst").write_bytes(long_window(b"text", 27))  # what the remedy says
    assert texts_of(tmp_path / "a.txt.zst") == ["text"]


def test_a_long_window_of_a_bomb_takes_bounded_memory(tmp_path: Path) -> None:
    (tmp_path / "a.txt.zst").write_bytes(long_window(bytes(1 << 27)))
    total, grown = size_and_memory_of_reading(tmp_path / "a.txt.zst")
    assert total == 1 << 27
    assert grown < 2048 + 400
