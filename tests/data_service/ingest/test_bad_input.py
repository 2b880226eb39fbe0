"""Mistakes in the input: each a clear error that names the file and the place, and nothing half-used."""

import gzip
import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data_service.corpus.corpus import show_documents
from data_service.errors import InputError
from data_service.ingest.files import open_text
from data_service.ingest.inputs import list_inputs
from data_service.ingest.options import BuildOptions
from data_service.store.errors import KeyMissing
from data_service.stream.statistics import corpus_stats
from tests.support.data.raw_text import DOCUMENTS, build, files_of, write_jsonl
from tests.support.data.text_files import PACKED, records_of, size_and_memory_of_reading, tar_of, texts_of

GOOD = json.dumps({"text": "A sentence. And another."}).encode() + b"\n"


def parquet(table: pa.Table) -> Callable[[Path], None]:
    return lambda path: pq.write_table(table, path)


def raw(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


CASES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "bad bytes in a text file": ("a.txt", raw(b"abc\xff\n"), r"a\.txt: byte 3 is not UTF-8 \(0xff"),
    "bad bytes in a line": ("a.jsonl", raw(GOOD + b'{"text": "\xc3("}'), rf"line 2: byte {len(GOOD) + 10} is"),
    "bad bytes inside gzip": ("a.txt.gz", raw(gzip.compress(b"ab\x80")), "byte 2 of the decompressed text"),
    "not JSON": ("a.jsonl", raw(GOOD * 2 + b"{oops}\n" + GOOD), r"a\.jsonl, line 3: not JSON"),
    "not JSON inside zstd": ("a.jsonl.zst", raw(zstandard.compress(GOOD + b"[1")), r"zst, line 2: not JSON"),
    "deep JSON": ("a.jsonl", raw(b'{"text": ' + b"[" * 30_000 + b"\n"), r"a\.jsonl, line 1: not JSON"),
    "no such field": (
        "a.jsonl",
        raw(GOOD + b'{"body": "x"}\n'),
        r"line 2: no field 'text' \(it has 'body'\)",
    ),
    "a long integer": ("a.jsonl", raw(b'{"text": ' + b"9" * 5000 + b"}\n"), r"'text' is LongInteger"),
    "null": ("a.jsonl", raw(b'{"text": null}\n'), r"line 1: field 'text' is NoneType"),
    "half a character": ("a.jsonl", raw(GOOD + b'{"text": "a\\ud800"}\n'), r"line 2: character 1 is half a"),
    "bad bytes in Parquet": (
        "a.parquet",
        parquet(pa.table({"text": pa.array([b"x", b"a\xffb"], pa.binary()).cast(pa.string(), safe=False)})),
        r"a\.parquet, row 1: byte 1 of the text is not UTF-8",
    ),
    "a whole JSON value": ("a.json.gz", raw(gzip.compress(b"[\n1]")), r"a\.json\.gz, line 1: not JSON"),
    "loose quotation in TSV": ("a.tsv", raw(b'text\tn\n"a" b\t1\n'), r"a\.tsv, line 2: not TSV"),
    "bad bytes in CSV": ("a.csv", raw(b"n,text\n1,a\xff\n"), r"a\.csv, line 2: byte 1 of the text is"),
    "line too long in CSV": ("a.csv", raw(b"n,text\n" + b"x," * 50_000), r"a\.csv, line 2: not CSV"),
    "no column in CSV": (
        "a.csv",
        raw(b"n,body\n1,a\n"),
        r"no column 'text' in its first line \(it has n, body",
    ),
    "empty CSV": ("a.csv", raw(b""), "no column 'text' in its first line"),
    "damaged Arrow": ("a.arrow", raw(b"plain text, no stream"), r"a\.arrow: not an Arrow file"),
    "damaged gzip": (
        "a.jsonl.gz",
        raw(gzip.compress(GOOD)[:-6] + b"\0" * 6),
        r"a\.jsonl\.gz: damaged or trunc",
    ),
    "truncated gzip": ("a.jsonl.gz", raw(gzip.compress(GOOD * 99)[:-9]), r"a\.jsonl\.gz: damaged or trunc"),
    "truncated zstd": (
        "a.txt.zst",
        raw(zstandard.compress(GOOD * 99)[:-3]),
        r"a\.txt\.zst: damaged or trunc",
    ),
    "not zstd": ("a.txt.zst", raw(b"plain text"), r"a\.txt\.zst: damaged or truncated zst"),
    "not Parquet": ("a.parquet", raw(b"plain text"), r"a\.parquet: not a Parquet file"),
    "no column": ("a.parquet", parquet(pa.table({"body": ["x"]})), r"no column 'text' \(it has body\)"),
    "column of numbers": ("a.parquet", parquet(pa.table({"text": [1]})), r"column 'text' has type int64"),
    "text of a line too long": (
        "a.jsonl",
        raw(GOOD + json.dumps({"text": "é" * 2501}, ensure_ascii=False).encode()),
        r"line 2: a document of more than 5,000 bytes",
    ),
}
OPTIONS = BuildOptions(max_document_bytes=5000, heldout_fraction=0)


@pytest.mark.parametrize("case", CASES)
def test_the_error_names_the_place_and_the_build_can_be_repeated(tmp_path: Path, case: str) -> None:
    name, spoil, problem = CASES[case]
    write_jsonl(tmp_path / "inputs/0-good.jsonl", ["Good text."])
    spoil(tmp_path / "inputs" / name)
    with pytest.raises(InputError, match=problem) as failure:
        build(tmp_path / "inputs", tmp_path / "corpus", OPTIONS)
    assert failure.value.remedy
    assert str(tmp_path / "inputs" / name) in failure.value.problem
    (tmp_path / "inputs" / name).unlink()
    assert build(tmp_path / "inputs", tmp_path / "corpus", OPTIONS).train.documents.sum() == 1


@pytest.mark.parametrize(
    ("name", "data"), [("a.txt", b""), ("a.txt", b" \n\n"), ("a.jsonl", b""), ("a.jsonl", b'{"text": " "}\n')]
)
def test_inputs_without_text_are_an_error(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs" / name).write_bytes(data)
    with pytest.raises(InputError, match=r"\bdocument\b"):
        build(tmp_path / "inputs", tmp_path / "corpus")
    assert files_of(tmp_path / "corpus") == {}


@pytest.mark.parametrize("suffix", list(PACKED)[1:])
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.tar", "in.tar/a.txt", "in.tar/a.tar"])
def test_a_packed_file_of_no_bytes_is_refused(tmp_path: Path, name: str, suffix: str) -> None:
    """It is a download that failed. Packed text of no bytes has a header, and is empty."""
    folder, _, inside = name.rpartition("/")
    path = tmp_path / (folder or name + suffix)
    for data in (b"", PACKED[suffix](b"")):
        path.write_bytes(tar_of({inside + suffix: data}) if folder else data)
        if not data or name.endswith("tar"):  # an archive of nothing ends too early
            with pytest.raises(InputError, match=re.escape(name + suffix)):
                records_of(path, OPTIONS)
        else:
            assert not any(texts_of(path, OPTIONS))


def test_bad_bytes_are_replaced_and_counted_when_asked_for(tmp_path: Path) -> None:
    (tmp_path / "inputs").mkdir()
    (tmp_path / "inputs/a.txt").write_bytes(b"caf\xe9 au lait")
    (tmp_path / "inputs/b.jsonl").write_bytes(GOOD + b'{"text": "\xff"}\n{"text": "x\\udc00y"}\n')
    options = BuildOptions(on_bad_bytes="replace", heldout_fraction=0)
    build(tmp_path / "inputs", tmp_path / "corpus", options)
    assert corpus_stats(str(tmp_path / "corpus")).counts["replaced"] == 3
    shown = show_documents(str(tmp_path / "corpus"), "train", 0, 9)
    assert ["".join(document.sentences) for document in shown] == [
        "caf\ufffd au lait",
        "A sentence. And another.",
        "\ufffd",
        "x\ufffd\ufffd\ufffdy",
    ]


def test_a_document_longer_than_a_block_gets_its_own(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "inputs/a.jsonl", ["short one.", "long " * 500, "short two."])
    options = BuildOptions(block_tokens=100, heldout_fraction=0)
    manifest = build(tmp_path / "inputs", tmp_path / "corpus", options)
    assert manifest.train.documents.tolist() == [1, 1, 1]
    assert manifest.train.tokens[1] >= 500


@pytest.mark.parametrize("fraction", [0.0005, 0.999999999])
def test_a_text_of_which_nothing_can_be_held_out_is_refused_and_may_be_added_to(
    tmp_path: Path, fraction: float
) -> None:
    options = BuildOptions(heldout_fraction=fraction)
    write_jsonl(tmp_path / "inputs/a.jsonl", ["One document."])
    with pytest.raises(InputError, match="13 bytes"):
        build(tmp_path / "inputs", tmp_path / "corpus", options)
    write_jsonl(tmp_path / "inputs/a.jsonl", DOCUMENTS[:3])
    manifest = build(tmp_path / "inputs", tmp_path / "corpus", options)
    assert manifest.heldout.tokens.sum()
    assert manifest.train.tokens.sum()


def test_an_output_among_the_inputs_is_refused(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "inputs/a.jsonl", ["One document."])
    with pytest.raises(InputError, match=r"\boutput\b.*\binput\b"):
        build(tmp_path / "inputs", tmp_path / "inputs")


@pytest.mark.long
def test_a_bomb_costs_little_memory(tmp_path: Path) -> None:
    """16 KB that stand for 512 MB: a line too long, found without holding them."""
    (tmp_path / "a.jsonl.zst").write_bytes(zstandard.compress(bytes(512 << 20), 19))
    total, grown = size_and_memory_of_reading(tmp_path / "a.jsonl.zst")
    assert total == 512 << 20
    assert grown < 60


def test_a_window_that_is_too_large_is_named(tmp_path: Path) -> None:
    """Arrow's reader, which has taken the first frame, does not read the second."""
    wide = zstandard.ZstdCompressionParameters(window_log=31)
    frame = zstandard.ZstdCompressor(compression_params=wide).compressobj()
    data = zstandard.compress(b"text") + frame.compress(b"text") + frame.flush()
    (tmp_path / "a.txt.zst").write_bytes(data)
    (file,) = list_inputs([str(tmp_path / "a.txt.zst")]).files
    with pytest.raises(InputError, match=r"window.*128 MiB"), open_text(file) as text:
        text.read()


def test_a_store_that_fails_under_compression_is_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.zst"
    path.write_bytes(zstandard.compress(os.urandom(1 << 20)))
    (file,) = list_inputs([str(path)]).files
    path.unlink()
    with pytest.raises(KeyMissing), open_text(file) as text:
        text.read()
