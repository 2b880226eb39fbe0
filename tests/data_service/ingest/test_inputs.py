"""From files, folders and globs to a list in a fixed order; from there to splits."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from s3_server import S3Server

from data_service.errors import InputError
from data_service.ingest.inputs import InputFile, list_inputs
from data_service.ingest.options import BuildOptions
from data_service.ingest.splits import plan_splits
from data_service.store.errors import StoreError
from data_service.store.open import open_store

NAMES = ["b.txt", "a.jsonl", "x/c.txt", "x/d.JSONL.GZ", "x/y/e.parquet", "x/notes.md", "x/y/f.jsonl.zst"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in NAMES:
        open_store(tmp_path / "in").put(name, name.encode())
    return tmp_path / "in"


PATTERNS = [
    ("", ["a.jsonl", "b.txt", "x/c.txt", "x/d.JSONL.GZ", "x/y/e.parquet", "x/y/f.jsonl.zst"], 1),
    ("/x/", ["x/c.txt", "x/d.JSONL.GZ", "x/y/e.parquet", "x/y/f.jsonl.zst"], 1),
    ("/b.txt", ["b.txt"], 0),
    ("/*.txt", ["b.txt"], 0),
    ("/**/*.txt", ["b.txt", "x/c.txt"], 0),
    ("/x/?.*", ["x/c.txt", "x/d.JSONL.GZ"], 0),
    ("/x/[a-d].txt", ["x/c.txt"], 0),
    ("/x/[!c].*", ["x/d.JSONL.GZ"], 0),
    ("/x/**", ["x/c.txt", "x/d.JSONL.GZ", "x/y/e.parquet", "x/y/f.jsonl.zst"], 1),
    ("/*/y/*", ["x/y/e.parquet", "x/y/f.jsonl.zst"], 0),
]


def assert_found(root: str, base: str, every: int = 1) -> None:
    for pattern, names, ignored in PATTERNS[::every]:
        listing = list_inputs([root + pattern])
        assert [file.uri.removeprefix(f"{base}/") for file in listing.files] == names, pattern
        assert [file.size for file in listing.files] == [len(name) for name in names]
        assert len(listing.left_out) == ignored


def test_patterns_in_folders(folder: Path) -> None:
    assert_found(str(folder), str(folder))
    assert_found(f"file://{folder}", str(folder))


def test_patterns_in_buckets(s3: S3Server) -> None:
    root = f"s3://{s3.new_bucket()}"
    for store in (open_store(root), open_store(f"{root}/some/where")):
        for name in NAMES:
            store.put(name, name.encode())
    assert_found(f"{root}/some/where", f"{root}/some/where", every=4)
    assert len(list_inputs([root]).files) == 12


def test_order_is_that_of_the_patterns_and_each_file_comes_once(folder: Path) -> None:
    listing = list_inputs([f"{folder}/x/c.txt", str(folder)])
    assert [file.uri.removeprefix(f"{folder}/") for file in listing.files][:3] == [
        "x/c.txt",
        "a.jsonl",
        "b.txt",
    ]
    assert len(listing.files) == 6


def test_relative_paths(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for pattern, count in (("b.txt", 1), ("*.txt", 1), (".", 6), ("./x", 4), ("x", 4), ("../in/b.txt", 1)):
        assert len(list_inputs([pattern]).files) == count, pattern
        assert all(file.uri.startswith("/") for file in list_inputs([pattern]).files)


def test_a_name_that_looks_like_a_glob_is_a_name_first(folder: Path) -> None:
    (folder / "part[1].txt").write_text("x")
    (file,) = list_inputs([f"{folder}/part[1].txt"]).files
    assert file.key == "part[1].txt"


def test_mistakes_name_the_pattern(folder: Path) -> None:
    for pattern, problem in (
        (f"{folder}/nothing", "no such file, or no text file"),
        (f"{folder}/x/notes.md", "unknown kind of file"),
        (f"{folder}/*.md", "no such file, or no text file"),
    ):
        with pytest.raises(InputError, match=problem) as failure:
            list_inputs([f"{folder}/b.txt", pattern])
        assert pattern in failure.value.problem
    with pytest.raises(InputError, match="no input given"):
        list_inputs([])
    with pytest.raises(StoreError, match="unknown scheme"):
        list_inputs(["ftp://somewhere/x.txt"])


FORMATS = [("txt", ""), ("txt", "gz"), ("jsonl", ""), ("jsonl", "zst"), ("parquet", "")]
files = st.lists(st.tuples(st.sampled_from(FORMATS), st.integers(0, 400_000)), min_size=1, max_size=30)


@settings(deadline=None)
@given(files, st.integers(5_000, 200_000), st.sampled_from(["file", "blank_line"]))
def test_splits_cover_every_byte_once_in_order(
    files: list[tuple[tuple[str, str], int]], split_bytes: int, txt_documents: str
) -> None:
    inputs = tuple(InputFile("/r", f"{i}", size, *kind) for i, (kind, size) in enumerate(files))
    options = BuildOptions(split_bytes=split_bytes, txt_documents=txt_documents)
    splits = plan_splits(inputs, options)
    pieces = [piece for split in splits for piece in split.pieces]
    assert [piece.file for piece in pieces] == sorted((p.file for p in pieces), key=lambda f: int(f.key))
    for file in inputs:
        cuts = [(piece.start, piece.stop) for piece in pieces if piece.file == file]
        assert cuts[0][0] == 0
        assert cuts[-1][1] == file.size
        assert all(stop == start for (_, stop), (start, _) in pairwise(cuts))
        if file.compression or (file.format == "txt" and txt_documents == "file"):
            assert len(cuts) == 1
        elif file.format == "jsonl":
            assert all(stop - start <= split_bytes for start, stop in cuts)
    assert all(split.pieces for split in splits)
