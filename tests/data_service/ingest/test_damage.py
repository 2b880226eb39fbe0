"""Damage in files of many records, whatever their format: each is read or refused by name, whole or cut into pieces."""

import random
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_service.errors import InputError
from tests.support.data import preparations
from tests.support.data.raw_text import DOCUMENTS
from tests.support.data.text_files import PACKED, tar_of


def tar(texts: list[str]) -> list[bytes]:
    """Of members with names so long that they have extended headers."""
    return [tar_of({f"{'é' * 80}{number}.txt": text.encode() for number, text in enumerate(texts)})]


def dump(texts: list[str]) -> list[bytes]:
    """The parts that a multistream dump packs one by one."""
    from tests.data_service.ingest.test_mediawiki import streams

    return [part.encode() for part in streams([(f"T{i}", 0, False, text) for i, text in enumerate(texts)])]


def shard(texts: list[str]) -> list[bytes]:
    from tests.data_service.ingest import test_mds

    return [test_mds.shard({"text": "str"}, [{"text": text} for text in texts])]


FORMATS: dict[str, Callable[[list[str]], list[bytes]]] = {"a.tar": tar, "a.xml": dump, "a.mds": shard}


def run(path: Path, out: Path, *, chunk: int = 4096, **more: object) -> None:
    preparations.run([{"source": "any", "files": [str(path)], **more}], [], out, chunk=chunk)


@pytest.fixture
def parts(name: str) -> list[bytes]:
    return FORMATS[name]([text[:2_000] for text in DOCUMENTS[:12]])


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 0.9999), suffix=st.sampled_from(sorted(PACKED)), small=st.booleans())
def test_a_file_cut_short_anywhere_is_refused_by_name(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    parts: list[bytes],
    share: float,
    suffix: str,
    small: bool,
) -> None:
    """Between two streams, too, where the packed data is whole; of an archive, before the empty blocks at its end."""
    monkeypatch.setattr("data_service.ingest.tasks._MIN_SPLIT_BYTES", 4096 if small else 1 << 22)
    folder = tmp_path_factory.mktemp("cut")
    data = b"".join(PACKED[suffix](part) for part in parts)
    if name == "a.mds":
        suffix = {".zst": ".zstd", ".xz": ""}.get(suffix, suffix)
    end = len(data) - 1 if suffix else len(data.rstrip(b"\0\n"))
    (folder / f"{name}{suffix}").write_bytes(data[: int(end * share)])
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        run(folder / f"{name}{suffix}", folder / "out")


@pytest.mark.long
@pytest.mark.parametrize("name", ["a.tar", "a.mds"])
def test_random_changes_are_read_or_refused(tmp_path: Path, name: str) -> None:
    """No byte of a header makes another error than ours."""
    drawn, problems = random.Random(5), list[str]()
    (data,) = FORMATS[name]([f"text {i}" for i in range(5)])
    for trial in range(40):
        changed = bytearray(data)
        for _ in range(drawn.randint(1, 3)):
            changed[drawn.randrange(len(data))] = drawn.randrange(256)
        (tmp_path / name).write_bytes(changed)
        try:
            run(tmp_path / name, tmp_path / f"out{trial}", on_bad_records="skip")
        except InputError as error:
            problems.append(error.problem)
    assert problems
    assert all(name in problem for problem in problems)


@pytest.mark.parametrize(
    ("name", "place"),
    [("a.tar", r"a\.tar/é+1\.txt, byte {}"), ("a.xml", r"a\.xml, byte \d+"), ("a.mds", r"a\.mds, row 1")],
)
def test_a_record_that_is_too_long_is_bad_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: str
) -> None:
    """In an archive that is cut into pieces, none of them holds its content."""
    monkeypatch.setattr("data_service.ingest.tasks._MIN_SPLIT_BYTES", 4096)
    (tmp_path / name).write_bytes(b"".join(FORMATS[name](["first", "long " * 1_000_000, "last"])))
    if name == "a.tar":
        with tarfile.open(tmp_path / name) as archive:
            place = place.format(archive.getmembers()[1].offset)
    with pytest.raises(InputError, match=place):
        run(tmp_path / name, tmp_path / "out", chunk=1 << 18, max_document_bytes=1 << 16)
    run(tmp_path / name, tmp_path / "out", chunk=1 << 18, max_document_bytes=1 << 16, on_bad_records="skip")
    assert [row["text"] for row in preparations.rows_of(tmp_path / "out/documents")] == ["first", "last"]
    assert [row["reason"] for row in preparations.rows_of(tmp_path / "out/dropped")] == ["bad_record"]
