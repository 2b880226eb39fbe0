"""Readers: wherever a file is cut, its documents come out once each, in order."""

import gzip
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.ingest.documents import read_documents
from data_service.ingest.inputs import list_inputs
from data_service.ingest.options import BuildOptions
from data_service.ingest.tasks import FilePiece, InputSplit
from tests.support.data.raw_text import write_parquet

OPTIONS = BuildOptions()
BLANK_LINE = BuildOptions(txt_documents="blank_line")


def read(path: Path, options: BuildOptions, cuts: list[int] | None = None) -> list[str]:
    (file,) = list_inputs([str(path)]).files
    edges = sorted({0, file.size, *(cut for cut in cuts or [] if cut < file.size)})
    splits = [InputSplit((FilePiece(file, a, b),)) for a, b in pairwise(edges)]
    return [document.text for split in splits for document in read_documents(split, options)]


@settings(deadline=None)
@given(st.text(st.sampled_from("ab \t\r\né"), max_size=60), st.lists(st.integers(0, 80)))
def test_text_between_blank_lines_cut_anywhere(
    tmp_path_factory: pytest.TempPathFactory, text: str, cuts: list[int]
) -> None:
    path = tmp_path_factory.mktemp("cut") / "a.txt"
    path.write_bytes(text.encode())
    expected: list[str] = []
    inside = False
    for line in text.encode().split(b"\n"):
        blank = not line.strip()
        if not blank and inside:
            expected[-1] += "\n" + line.decode()
        elif not blank:
            expected.append(line.decode())
        inside = not blank
    found = read(path, BLANK_LINE, cuts)
    assert [document.removesuffix("\n") for document in found] == expected


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 7), st.lists(st.integers(0, 4000)))
def test_parquet_cut_anywhere(
    tmp_path_factory: pytest.TempPathFactory, count: int, group: int, cuts: list[int]
) -> None:
    texts = [f"document {i} of {count}" for i in range(count)]
    path = write_parquet(tmp_path_factory.mktemp("cut") / "a.parquet", texts, group)
    assert read(path, OPTIONS, cuts) == texts


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_every_form_of_text_file(tmp_path: Path, suffix: str) -> None:
    packers: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".zst": zstandard.compress}
    pack = packers.get(suffix, bytes)
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(pack("\ufeffOne é\nstill one\n\nTwo\n".encode()))
    assert read(path, OPTIONS) == ["One é\nstill one\n\nTwo\n"]
    assert read(path, BLANK_LINE) == ["One é\nstill one\n", "Two\n"]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_compressed_files_of_several_members_are_read_to_the_end(tmp_path: Path, suffix: str) -> None:
    pack = gzip.compress if suffix == ".gz" else zstandard.compress
    lines = [json.dumps({"text": str(i) * 5000}).encode() + b"\n" for i in range(9)]
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(b"".join(pack(line) for line in lines))
    assert read(path, OPTIONS) == [str(i) * 5000 for i in range(9)]


def test_other_fields_and_blank_lines_are_nothing_to_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1, "body": "x"}\n\n  \n{"body": "y", "text": null}')
    assert read(path, BuildOptions(text_field="body")) == ["x", "y"]
