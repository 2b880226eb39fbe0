"""Inputs that were edited, replaced or only touched since a build, or in the middle of one."""

import os
from pathlib import Path

import pytest

from data_service.corpus.corpus import show_documents
from data_service.errors import CorpusError
from data_service.ingest.build import build_corpus
from data_service.ingest.pool import Progress
from data_service.store.base import Store
from tests.support.data.raw_text import (
    DOCUMENTS,
    SMALL,
    Killed,
    build,
    files_of,
    ignore_progress,
    killed_at,
    tokenizer_folder,
    write_jsonl,
)

OPTIONS = SMALL.model_copy(update={"heldout_fraction": 0})


def mask(path: Path, *, keep_times: bool = False) -> None:
    """An edit that leaves the size as it is."""
    before = path.stat()
    data = path.read_bytes()
    assert b"the" in data
    path.write_bytes(data.replace(b"the", b"XXX"))
    if keep_times:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


@pytest.mark.parametrize("keep_times", [False, True])
def test_an_edit_of_the_same_size_is_noticed(tmp_path: Path, keep_times: bool) -> None:
    path = write_jsonl(tmp_path / "inputs/a.jsonl", DOCUMENTS[:9])
    build(path.parent, tmp_path / "corpus", OPTIONS)
    before = files_of(tmp_path / "corpus")
    mask(path, keep_times=keep_times)
    with pytest.raises(CorpusError, match=r"a\.jsonl changed"):
        build(path.parent, tmp_path / "corpus", OPTIONS)
    assert files_of(tmp_path / "corpus") == before


def test_the_same_text_written_again_is_the_same_corpus(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "inputs/a.jsonl", DOCUMENTS[:9])
    build(path.parent, tmp_path / "corpus", OPTIONS)
    before = files_of(tmp_path / "corpus")
    path.write_bytes(path.read_bytes())
    build(path.parent, tmp_path / "corpus", OPTIONS)
    assert files_of(tmp_path / "corpus") == before


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "name", "kept"),
    [("reading", "a.jsonl", 0), ("writing", "a.jsonl", 1), ("writing", "c.jsonl", 2)],
)
def test_a_build_goes_on_with_the_text_as_it_is_now(tmp_path: Path, stage: str, name: str, kept: int) -> None:
    """What was written of other files is kept."""
    inputs = tmp_path / "inputs"
    for number, other in enumerate(["a.jsonl", "b.jsonl", "c.jsonl"]):
        texts = [text[:8000] for text in DOCUMENTS[number * 20 :][:20]]
        write_jsonl(inputs / other, texts * 2)
    with pytest.raises(Killed):
        build(inputs, tmp_path / "corpus", OPTIONS, killed_at(stage, 2))
    mask(inputs / name)
    seen: list[Progress] = []
    build(inputs, tmp_path / "corpus", OPTIONS, seen.append)
    build(inputs, tmp_path / "whole", OPTIONS)
    shards = {key: data for key, data in files_of(tmp_path / "whole").items() if key.endswith(".tar")}
    assert {key: files_of(tmp_path / "corpus")[key] for key in shards} == shards
    writing = next(progress for progress in seen if progress.stage == "writing")
    assert writing.done == kept


@pytest.mark.long
def test_an_object_that_was_replaced_is_noticed(any_store: Store, tmp_path: Path) -> None:
    tokenizer = tokenizer_folder(tmp_path / "tokenizer")
    output, source = any_store.with_prefix("corpus"), f"{any_store.uri}/inputs"
    any_store.put("inputs/a.txt", b"A name: Smith.")
    build_corpus([source], output.uri, tokenizer, OPTIONS, ignore_progress)
    any_store.put("inputs/a.txt", b"A name: XXXXX.")
    with pytest.raises(CorpusError, match=r"a\.txt changed"):
        build_corpus([source], output.uri, tokenizer, OPTIONS, ignore_progress)
    (shown,) = show_documents(output.uri, "train", 0)
    assert "Smith" in "".join(shown.sentences)
    assert list(output.list("build/")) == []
