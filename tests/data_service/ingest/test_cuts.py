"""A file that is cut into splits anywhere gives the documents of the whole file, and its bytes are read a few times,
however long its lines and however small the splits."""

import random
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.ingest.documents import read_records
from data_service.ingest.files import SMALL_FILE_BYTES
from data_service.ingest.inputs import list_inputs
from data_service.ingest.options import BuildOptions
from data_service.ingest.records import BadRecord, TextRecord
from data_service.ingest.tasks import FilePiece, InputSplit
from data_service.store.errors import KeyMissing
from data_service.store.local import LocalStore
from tests.support.data.raw_text import write_parquet

MOST = 12  # bytes of a document
RUNS = st.lists(
    st.sampled_from([b"a", b" ", b"\t", b"\n", b"\n\n", b" \n", b"bc" * 9, b" " * 15, b'"d"', b'{"text": "e"}']),
    max_size=40,
)


def documents_of(pieces: list[FilePiece], options: BuildOptions) -> list[object]:
    """Text and place of each, or the place of a bad one."""
    found: list[object] = []
    for piece in pieces:
        for record in read_records(InputSplit((piece,)), options):
            found.append(record.text if isinstance(record, TextRecord) else record.place.number)
            assert isinstance(record, TextRecord | BadRecord)
    return found


@settings(deadline=None)
@given(RUNS.map(b"".join), st.data())
def test_documents_do_not_depend_on_the_cuts(
    tmp_path_factory: pytest.TempPathFactory, text: bytes, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(["x.txt", "x.jsonl"]))
    path = tmp_path_factory.mktemp("cuts") / name
    path.write_bytes(text)
    (file,) = list_inputs([str(path)]).files
    options = BuildOptions(txt_documents="blank_line", on_bad_records="skip", max_document_bytes=MOST)
    inner = data.draw(st.lists(st.integers(1, max(1, len(text) - 1)), max_size=8, unique=True))
    edges = [0, *sorted(cut for cut in inner if cut < len(text)), len(text)]
    pieces = [FilePiece(file, start, stop) for start, stop in pairwise(edges)]
    whole = documents_of([FilePiece(file, 0, len(text))], options)
    assert documents_of(pieces, options) == whole


def texts_in_pieces(path: Path, options: BuildOptions, cuts: list[int]) -> list[str]:
    """The texts of a file's documents, which is cut at these bytes."""
    (file,) = list_inputs([str(path)]).files
    edges = sorted({0, file.size, *(cut for cut in cuts if cut < file.size)})
    found = documents_of([FilePiece(file, start, stop) for start, stop in pairwise(edges)], options)
    return [text for text in found if isinstance(text, str)]


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
    found = texts_in_pieces(path, BuildOptions(txt_documents="blank_line"), cuts)
    assert [document.removesuffix("\n") for document in found] == expected


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 7), st.lists(st.integers(0, 4000)))
def test_parquet_cut_anywhere(
    tmp_path_factory: pytest.TempPathFactory, count: int, group: int, cuts: list[int]
) -> None:
    texts = [f"document {i} of {count}" for i in range(count)]
    path = write_parquet(tmp_path_factory.mktemp("cut") / "a.parquet", texts, group)
    assert texts_in_pieces(path, BuildOptions(), cuts) == texts


def test_other_fields_and_blank_lines_are_nothing_to_json_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1, "body": "x"}\n\n  \n{"body": "y", "text": null}')
    assert texts_in_pieces(path, BuildOptions(text_field="body"), []) == ["x", "y"]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["a line", "a document of lines", "white space"])
@pytest.mark.parametrize("name", ["x.txt", "x.jsonl"])
def test_what_is_long_is_read_a_few_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kind: str
) -> None:
    """In splits of a hundredth of it."""
    size, split = 4 << 20, 40 << 10
    made: dict[str, Callable[[], bytes]] = {
        "a line": lambda: b"x" * size,
        "a document of lines": lambda: b"".join(b"line %d\n" % n for n in range(size // 12)),
        "white space": lambda: b" " * size,
    }
    text = b"one\n\n" + made[kind]() + b"\n\nanother\n"
    (tmp_path / name).write_bytes(text)
    read = [0]
    real = LocalStore.get_range

    def counting(self: LocalStore, key: str, start: int, length: int) -> bytes:
        read[0] += length
        return real(self, key, start, length)

    monkeypatch.setattr(LocalStore, "get_range", counting)
    (file,) = list_inputs([str(tmp_path / name)]).files
    options = BuildOptions(txt_documents="blank_line", on_bad_records="skip", max_document_bytes=1 << 16)
    edges = [*range(0, len(text), split), len(text)]
    pieces = [FilePiece(file, start, stop) for start, stop in pairwise(edges)]
    random.Random(1).shuffle(pieces)
    documents_of(pieces, options)
    assert read[0] < 8 * len(text)


def test_small_files_of_a_far_store_are_fetched_many_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the same documents, each file once; a file that is gone is the error that it was."""
    draw = random.Random(3)
    for number in range(60):
        text = "\n\n".join(f"{number} {draw.random()}" for _ in range(draw.randint(0, 4)))
        (tmp_path / f"{number:03d}.txt").write_text(text)
    (tmp_path / "030.txt").write_text("x" * (SMALL_FILE_BYTES + 1))  # not a small one
    files = list_inputs([str(tmp_path)]).files
    options = BuildOptions(txt_documents="blank_line", on_bad_records="skip")
    split = InputSplit(tuple(FilePiece(file, 0, file.size) for file in files))
    near = [record.text for record in read_records(split, options) if isinstance(record, TextRecord)]
    monkeypatch.setattr("data_service.ingest.documents._is_remote", lambda file: True)
    asked: list[str] = []
    together, most, lock = 0, 0, threading.Lock()
    real = LocalStore.get_range

    def counting(self: LocalStore, key: str, start: int, length: int) -> bytes:
        nonlocal together, most
        with lock:
            asked.append(key)
            together += 1
            most = max(most, together)
        time.sleep(0.002)
        with lock:
            together -= 1
        return real(self, key, start, length)

    monkeypatch.setattr(LocalStore, "get_range", counting)
    assert [record.text for record in read_records(split, options) if isinstance(record, TextRecord)] == near
    assert most > 4
    sizes = {file.key: file.size for file in files}
    assert all(asked.count(key) == bool(size) for key, size in sizes.items() if key != "030.txt")
    (tmp_path / "059.txt").unlink()
    with pytest.raises(KeyMissing):
        list(read_records(split, options))
