"""Archives of texts: whatever is in them, however they are packed, cut into pieces and damaged."""

import gzip
import io
import lzma
import random
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_service.errors import InputError
from data_service.prepare.statistics import Statistics
from tests.support.data import preparations
from tests.support.data.raw_text import DOCUMENTS, build, files_of
from tests.support.data.text_files import PACKED, records_of

Member = tuple[str, str | bytes | None]  # name, and a text, other bytes, or nothing for a link


def archive(members: list[Member], kind: int = tarfile.PAX_FORMAT) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w", format=kind) as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if content is None:
                info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
                file.addfile(info)
                continue
            data = content.encode() if isinstance(content, str) else content
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))
    return sink.getvalue()


def run(path: Path, out: Path, *, chunk: int = 4096, workers: int = 1, **more: Any) -> Statistics:
    source = {"source": "web", "files": [str(path)], **more}
    return preparations.run([source], [], out, workers=workers, chunk=chunk)


def table(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in preparations.rows_of(folder)}


NAMES = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12).map(lambda name: f"{name}.txt")
ODD = [
    "../../etc/x.txt",
    "/abs.txt",
    "a/" * 90 + "deep.txt",
    "x\n\x1b[2J.txt",
    "é" * 120 + ".txt",
    "no text.png",
    "a/._x.txt",
    "./x/.cache/y.txt",
]
TEXTS = st.sampled_from([text[:2_000] for text in DOCUMENTS[:12]])


@pytest.mark.long
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    members=st.lists(
        st.tuples(st.one_of(NAMES, st.sampled_from(ODD)), st.one_of(TEXTS, TEXTS, st.none())),
        min_size=1,
        max_size=30,
        unique_by=lambda member: member[0],
    ),
    kind=st.sampled_from([tarfile.PAX_FORMAT, tarfile.GNU_FORMAT]),
    suffix=st.sampled_from(sorted(PACKED)),
    twice=st.booleans(),
)
def test_every_member_is_a_document_or_is_counted(
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
    members: list[Member],
    kind: int,
    suffix: str,
    twice: bool,
) -> None:
    """Whole or cut into pieces, also two archives in one file, as `cat` joins them; nothing is written by its name."""
    monkeypatch.setattr("data_service.ingest.tasks._MIN_SPLIT_BYTES", 4096)
    folder = tmp_path_factory.mktemp("tar")
    data = archive(members, kind) + (archive([("last.txt", "the last one")], kind) if twice else b"")
    (folder / f"a.tar{suffix}").write_bytes(PACKED[suffix](data))
    hidden = {
        name for name, _ in members if any(re.fullmatch(r"\.(?!\.?$).*", part, re.DOTALL) for part in name.split("/"))
    }
    texts = [text for name, text in members if text is not None and name.endswith(".txt") and name not in hidden]
    texts += ["the last one"] if twice else []
    if not texts:
        return
    statistics = run(folder / f"a.tar{suffix}", folder / "out")
    kept, dropped = table(folder / "out/documents"), table(folder / "out/dropped")
    assert sorted(row["text"] for row in kept.values()) == sorted(map(str, texts))
    assert statistics.documents_read == len(members) + twice == len(kept) + len(dropped)
    reasons = [row["reason"] for row in dropped.values()]
    assert reasons.count("no_file") == sum(text is None for _, text in members)
    assert reasons.count("hidden_file") == sum(text is not None and name in hidden for name, text in members)
    assert {path.name for path in folder.iterdir()} == {f"a.tar{suffix}", "out"}


def test_openwebtext_is_archives_in_an_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its documents are named by all archives that they lie in; pieces give what the whole gives."""
    inner = {
        f"openwebtext/urlsf_subset00-{i}_data.xz": lzma.compress(
            archive([(f"{i:04}-{j}.txt", f"{i} {j} {DOCUMENTS[i * 5 + j][:1_500]}") for j in range(5)])
        )
        for i in range(8)
    }
    (tmp_path / "openwebtext.tar.xz").write_bytes(lzma.compress(archive(list(inner.items()))))
    run(tmp_path / "openwebtext.tar.xz", tmp_path / "whole", chunk=1 << 26)
    monkeypatch.setattr("data_service.ingest.tasks._MIN_SPLIT_BYTES", 4096)
    run(tmp_path / "openwebtext.tar.xz", tmp_path / "pieces")
    kept = table(tmp_path / "pieces/documents")
    assert kept == table(tmp_path / "whole/documents")
    assert len(files_of(tmp_path / "pieces")) > 3
    assert len(kept) == 40
    name = "web/openwebtext.tar.xz/openwebtext/urlsf_subset00-3_data.xz/0003-1.txt:byte-"
    (row,) = (row for key, row in kept.items() if key.startswith(name))
    assert row["text"].startswith("3 1 ")


def test_texts_of_a_member_between_blank_lines(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(
        archive([("a.txt", "one\n\ntwo\n\n\nthree"), ("b.txt.gz", gzip.compress(b"four"))])
    )
    run(tmp_path / "a.tar", tmp_path / "out", txt_documents="blank_line")
    assert [row["text"].strip() for row in table(tmp_path / "out/documents").values()] == [
        *("one", "two", "three", "four")
    ]


def test_bad_text_and_what_is_no_archive_name_their_place(tmp_path: Path) -> None:
    (tmp_path / "a.tar.xz").write_bytes(lzma.compress(archive([("d/x.txt", b"bad \xff text")])))
    with pytest.raises(InputError, match=r"a\.tar\.xz/d/x\.txt"):
        run(tmp_path / "a.tar.xz", tmp_path / "out")
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(b"this is not an archive\n" * 60))
    with pytest.raises(InputError, match=r"b\.tar\.gz"):
        run(tmp_path / "b.tar.gz", tmp_path / "out2")


def test_a_corpus_is_built_of_an_archive(tmp_path: Path) -> None:
    members: list[Member] = [(f"{i}.txt", text[:900]) for i, text in enumerate(DOCUMENTS[:40])]
    (tmp_path / "a.tar.xz").write_bytes(lzma.compress(archive([*members, ("x.png", b"\x89PNG")])))
    manifest = build(tmp_path / "a.tar.xz", tmp_path / "corpus")
    assert (manifest.counts["documents_read"], manifest.counts["empty"]) == (41, 1)


def gnu_member(name: str, kind: bytes, size: int, stretches: int = 0) -> bytes:
    """Return a member of GNU's format that states `size`; a file with holes has `stretches` of one byte each."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, stretches or size
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    structs = [b"%011o\0%011o\0" % (2 * i, 1) for i in range(stretches)]
    blocks = [b"".join(structs[at : at + 21]).ljust(504, b"\0") for at in range(4, len(structs), 21)]
    if kind == tarfile.GNUTYPE_SPARSE:
        header[386:482] = b"".join(structs[:4]).ljust(96, b"\0")
        header[482:495] = b"%c%011o\0" % (bool(blocks), 2 * stretches)
        header[148:156] = b" " * 8
        header[148:156] = b"%06o\0 " % sum(header)
    flags = [(i + 1 < len(blocks)).to_bytes(8, "little") for i in range(len(blocks))]
    content = b"" if kind in (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE) else b"x" * info.size
    return bytes(header) + b"".join(map(bytes.__add__, blocks, flags)) + content + bytes(-len(content) % 512)


@pytest.mark.parametrize("suffix", PACKED)
def test_files_with_holes_and_lists_of_folders_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """Also where an archive is cut into pieces. Python's reader finds the same members."""
    monkeypatch.setattr("data_service.ingest.tasks._MIN_SPLIT_BYTES", 4096)
    drawn, data = random.Random(11), b""
    kinds = [tarfile.GNUTYPE_SPARSE, b"D", b"V", tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE]
    for number in range(60):
        if drawn.random() < 0.5:
            data += archive([(f"{number}.txt", f"text {number}")], tarfile.GNU_FORMAT)[:1024]
        else:
            stretches = drawn.choice([1, 4, 5, 25, 26, 80])
            kind = drawn.choice(kinds)
            data += gnu_member(
                f"{number}", kind, drawn.randrange(2_000), stretches if kind == tarfile.GNUTYPE_SPARSE else 0
            )
    data += bytes(1024)
    (tmp_path / f"a.tar{suffix}").write_bytes(PACKED[suffix](data))
    with tarfile.open(fileobj=io.BytesIO(data)) as reference:
        names = reference.getnames()
    assert len(names) == 60
    statistics = run(tmp_path / f"a.tar{suffix}", tmp_path / "out")
    kept, dropped = table(tmp_path / "out/documents").values(), table(tmp_path / "out/dropped").values()
    assert statistics.documents_read == 60
    assert [row["text"] for row in kept] == [f"text {name[:-4]}" for name in names if name.endswith(".txt")]
    assert [row["reason"] for row in dropped] == ["no_file"] * sum(not name.endswith(".txt") for name in names)


def test_headers_that_state_too_much_are_refused_or_not_followed(tmp_path: Path) -> None:
    """A map of a file with holes that never ends, and numbers of more digits than Python converts."""
    whole = gnu_member("holes", tarfile.GNUTYPE_SPARSE, 0, 50)
    endless = bytearray(whole[:1024])
    endless[1016] = 1
    for data in (whole[:512], whole[:900], whole[:1024], bytes(endless) + bytes(endless[512:]) * 3_000):
        (tmp_path / "a.tar").write_bytes(data)
        with pytest.raises(InputError, match=r"a\.tar\b.*\b512\b"):
            records_of(tmp_path / "a.tar")
    for record in (b"5017 size=" + b"9" * 5_006 + b"\n", b"9" * 5_000 + b" size=1\n", "11 size=\u00b2\n".encode()):
        info = tarfile.TarInfo("x")
        info.type, info.size = tarfile.XHDTYPE, len(record)
        header = info.tobuf(tarfile.USTAR_FORMAT) + record + bytes(-len(record) % 512)
        (tmp_path / "a.tar").write_bytes(header + archive([("a.txt", "text")]))
        assert run(tmp_path / "a.tar", tmp_path / f"out{len(record)}").documents_kept == 1
