"""From files, folders and globs to a list in a fixed order; from there to splits."""

import os
from itertools import pairwise
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.errors import InputError
from data_service.ingest.build import build_corpus
from data_service.ingest.file_kinds import Compression, Format
from data_service.ingest.inputs import InputFile, list_inputs
from data_service.ingest.options import BuildOptions
from data_service.ingest.tasks import plan_splits
from data_service.store.errors import StoreError
from data_service.store.open import open_store
from data_service.tokenizers.load import save_tokenizer
from data_service.tokenizers.train import train_tokenizer
from tests.support.data.raw_text import ignore_progress, tokenizer_folder, write_jsonl
from tests.support.stores.service import Service

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


@pytest.mark.long
@pytest.mark.parametrize("server", ["s3", "gs", pytest.param("az", marks=pytest.mark.azurite)])
def test_patterns_in_buckets(request: pytest.FixtureRequest, server: str) -> None:
    service: Service = request.getfixturevalue(server)
    root = f"{service.scheme}://{service.new_bucket()}"
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


def test_relative_paths_find_the_same_files_and_become_absolute(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for pattern, count in (("b.txt", 1), ("*.txt", 1), (".", 6), ("./x", 4), ("x", 4), ("../in/b.txt", 1)):
        assert len(list_inputs([pattern]).files) == count, pattern
        assert all(file.uri.startswith("/") for file in list_inputs([pattern]).files)


def test_a_name_that_looks_like_a_glob_is_a_name_first(folder: Path) -> None:
    (folder / "part[1].txt").write_text("x")
    (file,) = list_inputs([f"{folder}/part[1].txt"]).files
    assert file.key == "part[1].txt"


@pytest.mark.parametrize("name", ["data[1]", "what?", "a*b", "[z-a]", "[", "[!]", "x[\\\\]"])
def test_folders_with_names_that_look_like_globs(tmp_path: Path, name: str) -> None:
    for below in (name, f"{name}/deep {name}"):
        open_store(tmp_path / below).put("a.txt", b"x")
    for pattern, count in (
        (name, 2),
        (f"{name}/*.txt", 1),
        (f"{name}/**/*.txt", 2),
        (f"{name}/deep {name}", 1),
    ):
        assert len(list_inputs([f"{tmp_path}/{pattern}"]).files) == count, pattern


def test_globs_that_make_no_sense_are_named(folder: Path) -> None:
    with pytest.raises(InputError, match=r"\[z-a\].*\bglob\b"):
        list_inputs([f"{folder}/[z-a].txt"])
    with pytest.raises(InputError, match="file"):
        list_inputs([f"{folder}/[\\\\].txt"])


def test_links_that_lead_in_circles(tmp_path: Path) -> None:
    open_store(tmp_path / "in/deep").put("a.txt", b"x")
    open_store(tmp_path / "beside").put("b.txt", b"x")
    circles = {"self": "self", "up": "..", "in/up": "../in", "in/deep/top": "../..", "beside/back": "../in"}
    for link, target in {**circles, "in/on": "../beside"}.items():
        (tmp_path / link).symlink_to(target)
    assert [file.key for file in list_inputs([str(tmp_path)]).files] == [
        "beside/b.txt",
        "beside/back/deep/a.txt",
        "in/deep/a.txt",
        "in/on/b.txt",
    ]


def reasons(folder: Path) -> dict[str, str]:
    left_out = list_inputs([str(folder)]).left_out
    return {item.uri.removeprefix(f"{folder}/"): item.reason for item in left_out}


def test_a_tokenizer_below_the_text_is_not_text(folder: Path) -> None:
    tokenizer_folder(folder / "bpe")
    small = train_tokenizer("wordpiece", iter(["some text of words"] * 9), 36)
    save_tokenizer(small, str(folder / "x/wordpiece"))
    (folder / "x/wordpiece/notes.txt").write_text("about it")
    (folder / "vocab.txt").write_text("a text of this name, alone")
    keys = [file.key for file in list_inputs([str(folder)]).files]
    assert keys == sorted(["a.jsonl", "b.txt", "vocab.txt", *NAMES[2:5], NAMES[6], "x/wordpiece/notes.txt"])
    out = reasons(folder)
    assert "kind" in out.pop("x/notes.md")
    (why,) = set(out.values())
    assert "tokenizer" in why
    assert {"bpe/merges.txt", "bpe/tokenizer.json", "x/wordpiece/vocab.txt"} <= set(out)
    assert [file.key for file in list_inputs([f"{folder}/**/*.txt"]).files].count("x/wordpiece/vocab.txt") == 0
    (named,) = list_inputs([f"{folder}/x/wordpiece/vocab.txt"]).files
    assert named.key == "vocab.txt"


def test_a_corpus_below_the_text_is_not_text(tmp_path: Path) -> None:
    """So that the same command can be given again, whether it was killed, refused or finished."""
    inputs, corpus = tmp_path / "in", tmp_path / "in/corpus"
    write_jsonl(inputs / "a.jsonl", ["One text.", "Another text."])
    (inputs / "b.json").write_text("no JSON")
    arguments = [str(inputs)], str(corpus), tokenizer_folder(inputs / "bpe"), BuildOptions(heldout_fraction=0)
    for _ in range(2):
        with pytest.raises(InputError, match=r"b\.json, line 1"):
            build_corpus(*arguments, ignore_progress)
    (inputs / "b.json").unlink()
    for _ in range(2):
        build_corpus(*arguments, ignore_progress)
    assert [file.key for file in list_inputs([str(tmp_path / "in")]).files] == ["a.jsonl"]
    assert "corpus" in reasons(tmp_path / "in")["corpus/"]


def test_a_folder_of_unknown_kinds_names_them(tmp_path: Path) -> None:
    for name in ("a.json.lz4", "b.docx"):
        (tmp_path / name).write_text("x")
    with pytest.raises(InputError, match=r"\n.*a\.json\.lz4 \(.*\bkind\)\n.*b\.docx"):
        list_inputs([str(tmp_path)])


def test_mistakes_name_the_pattern(folder: Path) -> None:
    for pattern, problem in (
        (f"{folder}/nothing", "no such file, or no text file"),
        (f"{folder}/x/notes.md", "unknown kind of file"),
        (f"{folder}/*.md", "no such file, or no text file"),
    ):
        with pytest.raises(InputError, match=problem) as failure:
            list_inputs([f"{folder}/b.txt", pattern])
        assert pattern in failure.value.problem
    with pytest.raises(InputError, match="input"):
        list_inputs([])
    with pytest.raises(StoreError, match="'ftp'"):
        list_inputs(["ftp://somewhere/x.txt"])


FORMATS: list[tuple[Format, Compression]] = [
    ("txt", ""),
    ("txt", "gz"),
    ("jsonl", ""),
    ("jsonl", "zst"),
    ("parquet", ""),
]
files = st.lists(st.tuples(st.sampled_from(FORMATS), st.integers(0, 400_000)), min_size=1, max_size=30)


@settings(deadline=None)
@given(files, st.integers(5_000, 200_000), st.sampled_from(["file", "blank_line"]))
def test_splits_cover_every_byte_once_in_order(
    tmp_path_factory: pytest.TempPathFactory,
    files: list[tuple[tuple[Format, Compression], int]],
    split_bytes: int,
    txt_documents: Literal["file", "blank_line"],
) -> None:
    root = tmp_path_factory.mktemp("r")
    inputs = tuple(InputFile(str(root), f"{i}", size, *kind) for i, (kind, size) in enumerate(files))
    for file in inputs:  # holes: only its first bytes are looked at
        (root / file.key).touch()
        os.truncate(root / file.key, file.size)
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
