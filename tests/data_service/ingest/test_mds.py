"""Shards of MosaicML Streaming: their texts and numbers, what an index says, and shards that are damaged."""

import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_service.errors import InputError
from data_service.ingest.inputs import list_inputs
from tests.support.data import preparations
from tests.support.data.text_files import PACKED

PACKERS = {suffix.replace("zst", "zstd"): pack for suffix, pack in PACKED.items() if suffix != ".xz"}
FIXED = {"int": "<i8", "int32": "<i4", "uint64": "<u8", "float32": "<f4"}


def encoded(value: Any, encoding: str) -> bytes:
    if encoding in FIXED:
        return np.array(value, FIXED[encoding]).tobytes()
    return (
        value if isinstance(value, bytes) else json.dumps(value).encode() if encoding == "json" else str(value).encode()
    )


def shard(columns: dict[str, str], samples: Sequence[dict[str, Any]]) -> bytes:
    """Return a shard, written from the published description of the format. Columns are sorted by name."""
    names = sorted(columns)
    sizes = [np.dtype(FIXED[columns[name]]).itemsize if columns[name] in FIXED else None for name in names]
    config = {"version": 2, "format": "mds", "compression": None, "hashes": [], "size_limit": 1 << 26}
    config |= {
        "column_names": names,
        "column_encodings": [columns[name] for name in names],
        "column_sizes": sizes,
    }
    head = json.dumps(config, sort_keys=True).encode()
    bodies = []
    for sample in samples:
        values = [encoded(sample[name], columns[name]) for name in names]
        varying = [len(value) for value, size in zip(values, sizes, strict=True) if size is None]
        bodies.append(struct.pack(f"<{len(varying)}I", *varying) + b"".join(values))
    begin = 4 + 4 * (len(samples) + 1) + len(head)
    offsets = np.cumsum([begin, *map(len, bodies)]).astype("<u4")
    return struct.pack("<I", len(samples)) + offsets.tobytes() + head + b"".join(bodies)


def write(folder: Path, shards: Sequence[bytes], suffix: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    listed = []
    for number, data in enumerate(shards):
        name, packed = f"shard.{number:05}.mds", PACKERS[suffix](data)
        (folder / f"{name}{suffix}").write_bytes(packed)
        zipped = {"basename": name + suffix, "bytes": len(packed), "hashes": {}} if suffix else None
        listed.append({"raw_data": {"basename": name, "bytes": len(data), "hashes": {}}, "zip_data": zipped})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": listed}))
    return folder


def table(path: Path, out: Path, **more: Any) -> list[dict[str, Any]]:
    preparations.run([{"source": "mds", "files": [str(path)], **more}], [], out)
    return preparations.rows_of(out / "documents")


COLUMNS = {"text": "str", "id": "int", "src": "bytes", "score": "float32", "tokens": "ndarray"}
SAMPLES = st.lists(
    st.fixed_dictionaries(
        {
            "text": st.text(st.characters(codec="utf-8"), min_size=1, max_size=30).map(lambda text: f"x{text}"),
            "src": st.sampled_from([b"wiki", "b\u00fccher".encode()]),
            "score": st.floats(width=32, allow_nan=False),
            "tokens": st.binary(max_size=9),
        }
    ),
    min_size=1,
    max_size=9,
)


@pytest.mark.long
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(SAMPLES, min_size=1, max_size=3), st.sampled_from(sorted(PACKERS)))
def test_every_sample_is_a_document(
    tmp_path_factory: pytest.TempPathFactory, shards: list[list[dict[str, Any]]], suffix: str
) -> None:
    folder = tmp_path_factory.mktemp("mds")
    numbered = [dict(sample, id=i * 100 + j) for i, each in enumerate(shards) for j, sample in enumerate(each)]
    cut = iter(numbered)
    write(folder / "in", [shard(COLUMNS, [next(cut) for _ in each]) for each in shards], suffix)
    rows = table(folder / "in", folder / "out", fields={"id": "id", "url": "src", "date": "score"})
    assert [row["text"] for row in rows] == [sample["text"] for sample in numbered]
    assert [row["id"] for row in rows] == [str(sample["id"]) for sample in numbered]
    assert [row["url"] for row in rows] == [sample["src"].decode() for sample in numbered]
    assert [float(row["date"]) for row in rows] == [sample["score"] for sample in numbered]


def test_an_index_says_what_must_be_there(tmp_path: Path) -> None:
    data = [shard({"text": "str"}, [{"text": f"text {i}"}]) for i in range(3)]
    folder = write(tmp_path / "in", data, ".zstd")
    (folder / "shard.00001.mds").write_bytes(data[1])  # unpacked by a reader that keeps both
    (folder / "shard.00007.mds").write_bytes(data[2])
    listing = list_inputs([str(folder)])
    assert [file.key for file in listing.files] == [
        *("shard.00000.mds.zstd", "shard.00001.mds", "shard.00002.mds.zstd")
    ]
    assert {Path(item.uri).name for item in listing.left_out} == {
        *("index.json", "shard.00001.mds.zstd", "shard.00007.mds")
    }
    (folder / "shard.00002.mds.zstd").write_bytes(b"short")
    with pytest.raises(InputError, match=r"shard\.00002\.mds\.zstd has 5 bytes"):
        list_inputs([str(folder)])
    (folder / "shard.00002.mds.zstd").unlink()
    with pytest.raises(InputError, match=r"shard\.00002\.mds"):
        list_inputs([str(folder)])
    (folder / "index.json").write_text("{")
    with pytest.raises(InputError, match=r"index\.json"):
        list_inputs([str(folder)])


def test_pickles_are_never_read(tmp_path: Path) -> None:
    columns, sample = {"text": "str", "id": "pkl"}, {"text": "x", "id": b"cos\nsystem\n(S'false'\ntR."}
    folder = write(tmp_path / "in", [shard(columns, [sample])])
    with pytest.raises(InputError, match=r"00000\.mds: column 'id' .*pkl"):
        table(folder, tmp_path / "out", fields={"id": "id"})
    assert [row["text"] for row in table(folder, tmp_path / "other")] == ["x"]


def test_a_json_value_that_is_neither_text_nor_a_number_is_a_bad_record(tmp_path: Path) -> None:
    drawn, texts = random.Random(7), ["a", "null", 3, -2.5]
    others: list[Any] = [None, True, False, [], {}, ["a"], {"text": "a"}]
    values = drawn.choices([*texts, *others], k=40)
    write(tmp_path / "in", [shard({"text": "json"}, [{"text": value} for value in values])])
    with pytest.raises(InputError) as failure:
        table(tmp_path / "in", tmp_path / "out")
    first = next(row for row, value in enumerate(values) if value in others)
    assert f"00000.mds, row {first}:" in failure.value.problem
    rows = table(tmp_path / "in", tmp_path / "skipped", on_bad_records="skip")
    assert [row["text"] for row in rows] == [str(value) for value in values if value not in others]
