"""Big compressed files: pieces of whole documents from one reader, and builds that go on inside a file."""

import gzip
import random
from itertools import pairwise
from pathlib import Path

import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.errors import InputError, RayLost
from data_service.ingest.documents import read_documents
from data_service.ingest.inputs import list_inputs
from data_service.ingest.options import BuildOptions
from data_service.ingest.pool import Progress
from data_service.ingest.streamed import PieceReader
from data_service.ingest.tasks import FilePiece, InputSplit
from tests.support.data.raw_text import DOCUMENTS, SMALL, Killed, build, files_of, killed_at, write_jsonl
from tests.support.data.text_files import PACKED

FINE = SMALL.model_copy(update={"split_bytes": 25_000})
BLANK_LINE = BuildOptions(txt_documents="blank_line", max_document_bytes=1000)
TEXTS = [text[: 200 + 97 * i] for i, text in enumerate(DOCUMENTS)]


def pieces_of(path: Path, size: int, cuts: list[int]) -> list[FilePiece]:
    (file,) = list_inputs([str(path)]).files
    edges = sorted({0, size, *(cut for cut in cuts if cut < size)})
    return [FilePiece(file, start, stop, size) for start, stop in pairwise(edges)]


def documents_of(piece: FilePiece, options: BuildOptions) -> list[str]:
    return [document.text for document in read_documents(InputSplit((piece,)), options)]


def check_any_pieces(path: Path, data: bytes, cuts: list[int], options: BuildOptions, draw: int) -> None:
    """The documents of all pieces are those of the file; a reader that begins anywhere hands out the same."""
    path.write_bytes(PACKED[path.suffix](data))
    pieces = pieces_of(path, len(data), cuts)
    reader = PieceReader()
    handed = [reader.read(piece, options) for piece in pieces]
    (file,) = list_inputs([str(path)]).files
    whole = documents_of(FilePiece(file, 0, file.size), options)
    assert [text for piece in handed for text in documents_of(piece, options)] == whole
    assert b"".join(piece.text or b"" for piece in handed) == data
    other = PieceReader()
    for number in random.Random(draw).choices(range(len(pieces)), k=4):
        assert other.read(pieces[number], options) == handed[number]


JSON_LINES = st.lists(st.text(st.characters(codec="utf-8"), max_size=30), min_size=1, max_size=12)
PARAGRAPHS = st.text(st.sampled_from("ab \t\r\n\né"), min_size=1, max_size=80)


@settings(deadline=None)
@given(
    JSON_LINES | PARAGRAPHS,
    st.lists(st.integers(0, 600)),
    st.sampled_from([".gz", ".zst"]),
    st.integers(0, 9),
)
def test_json_lines_and_text_between_blank_lines_in_any_pieces(
    tmp_path_factory: pytest.TempPathFactory, text: list[str] | str, cuts: list[int], suffix: str, draw: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    if isinstance(text, str):
        check_any_pieces(folder / f"a.txt{suffix}", text.encode(), cuts, BLANK_LINE, draw)
    else:
        data = write_jsonl(folder / "a.jsonl", text).read_bytes()
        check_any_pieces(folder / f"b.jsonl{suffix}", data, cuts, BuildOptions(), draw)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz"])
def test_a_document_without_end_takes_no_more_memory_than_is_accepted(tmp_path: Path, name: str) -> None:
    data = (b"x" * 99 + b"\n" if "txt" in name else b"x") * 50_000
    (tmp_path / name).write_bytes(gzip.compress(data))
    first, *_ = pieces_of(tmp_path / name, len(data), [1000])
    handed = PieceReader().read(first, BLANK_LINE)
    assert len(handed.text or b"") < 20_000
    with pytest.raises(InputError, match=r"document.*\b[18],000 bytes"):
        documents_of(handed, BLANK_LINE)


@pytest.mark.parametrize("change", [b"", b'{"text": "one more"}\n'])
def test_a_file_of_another_length_than_was_measured_is_refused(tmp_path: Path, change: bytes) -> None:
    data = write_jsonl(tmp_path / "a.jsonl", TEXTS[:9]).read_bytes()
    path = tmp_path / "b.jsonl.gz"
    path.write_bytes(gzip.compress(data + change if change else data[:-400]))
    *_, last = pieces_of(path, len(data), [2000])
    with pytest.raises(InputError, match=r"b\.jsonl\.gz changed"):
        PieceReader().read(last, BuildOptions())


@pytest.fixture(scope="module", params=["a.jsonl.gz", "a.jsonl.zst"])
def big(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inputs with one compressed file of many splits between two others."""
    folder = tmp_path_factory.mktemp("big") / "inputs"
    write_jsonl(folder / request.param, TEXTS)
    (folder / "0.txt").write_text("A document before.")
    write_jsonl(folder / "b.jsonl", [*TEXTS[3:6], "Another document."])
    return folder


@pytest.fixture(scope="module")
def whole(big: Path) -> dict[str, bytes]:
    """What is built of them without interruption."""
    build(big, big.parent / "whole", FINE)
    return files_of(big.parent / "whole")


@pytest.mark.long
def test_a_big_compressed_file_is_many_tasks(tmp_path: Path, big: Path) -> None:
    seen: list[Progress] = []
    manifest = build(big, tmp_path / "corpus", FINE, seen.append)
    assert seen[0].stage == "measuring"
    totals = {stage: [each.total for each in seen if each.stage == stage] for stage in ("reading", "writing")}
    assert max(totals["writing"]) == max(totals["reading"]) > 5
    assert len(set(totals["writing"])) == 2, "a few come first, to see what the tokenizer loses"
    assert manifest.counts["documents_read"] == len(TEXTS) + 5
    assert manifest.counts["duplicates"] == 3 + len(TEXTS) - len(set(TEXTS))


@pytest.mark.long
@pytest.mark.parametrize(("stage", "done"), [("measuring", 1), ("reading", 5), ("writing", 2)])
def test_an_interrupted_build_goes_on_inside_the_file(
    tmp_path: Path, big: Path, whole: dict[str, bytes], stage: str, done: int
) -> None:
    with pytest.raises(Killed):
        build(big, tmp_path / "new", FINE, killed_at(stage, done))
    seen: list[Progress] = []
    build(big, tmp_path / "new", FINE, seen.append)
    assert next(progress.done for progress in seen if progress.stage == stage) == done
    assert files_of(tmp_path / "new") == whole


def test_damage_is_found_before_any_text_is_used(tmp_path: Path, big: Path) -> None:
    source = next(big.glob("a.jsonl.*"))
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    (inputs / source.name).write_bytes(source.read_bytes()[:-20])
    with pytest.raises(InputError, match=r"damaged.* (gz|zst)\b"):
        build(inputs, tmp_path / "corpus", FINE)
    assert files_of(tmp_path / "corpus") == {}
    (inputs / source.name).write_bytes(source.read_bytes())
    assert build(inputs, tmp_path / "corpus", FINE).counts["documents_read"] == len(TEXTS)


def test_a_ray_that_does_not_start_is_an_error_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_slow(**_: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", too_slow)
    write_jsonl(tmp_path / "inputs/a.jsonl", DOCUMENTS)
    with pytest.raises(RayLost, match="The current node timed out") as failure:
        build(tmp_path / "inputs", tmp_path / "corpus", SMALL.model_copy(update={"workers": 2}))
    assert "--workers 1" in failure.value.remedy
