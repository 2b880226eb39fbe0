"""`build_corpus` as a whole: every form of input, interruption at any point, and refusals."""

import hashlib
import resource
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_service.corpus.corpus import open_corpus, show_documents, verify_corpus
from data_service.corpus.provenance import ProvenanceOptions
from data_service.corpus.reader import read_block
from data_service.errors import CorpusError, InputError
from data_service.ingest import deduplicate
from data_service.ingest.build import build_corpus
from data_service.ingest.options import BuildOptions, PairFields
from data_service.ingest.pool import Progress
from data_service.store.base import Store
from data_service.store.errors import OutOfSpace
from data_service.stream.statistics import corpus_stats
from data_service.tokenizers.load import save_tokenizer
from data_service.tokenizers.train import train_tokenizer
from tests.support.data.raw_text import (
    DOCUMENTS,
    SMALL,
    Killed,
    build,
    decoded_documents,
    files_of,
    ignore_progress,
    killed_after,
    killed_at,
    small_tokenizer,
    tokenizer_folder,
    write_jsonl,
    write_mixture,
    write_parquet,
)
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.s3 import S3Server


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mixture(tmp_path_factory.mktemp("build") / "inputs")


@pytest.fixture(scope="module")
def corpus(inputs: Path) -> Path:
    build(inputs, inputs.parent / "corpus")
    return inputs.parent / "corpus"


def test_every_document_is_there_once_as_text(corpus: Path) -> None:
    opened = open_corpus(str(corpus))
    train = decoded_documents(opened.store, opened.manifest.train)
    heldout = decoded_documents(opened.store, opened.manifest.heldout)
    expected = set(DOCUMENTS)
    assert len(train) + len(heldout) == len(expected) == len(DOCUMENTS)
    assert {*train, *heldout} == expected
    assert len(heldout) > 2


def test_the_manifest_counts_what_the_blocks_hold(corpus: Path) -> None:
    opened = open_corpus(str(corpus))
    manifest = opened.manifest
    blocks = [read_block(opened.store, manifest.train, index) for index in range(len(manifest.train))]
    tokens = np.concatenate([block.tokens for block in blocks])
    np.testing.assert_array_equal(manifest.unigram, np.bincount(tokens, minlength=manifest.vocab_size))
    lengths = np.concatenate([np.diff(block.sentences[block.documents]) for block in blocks])
    histogram = np.bincount(np.log2(lengths).astype(int), minlength=len(manifest.document_lengths))
    assert histogram.tolist() == list(manifest.document_lengths)
    assert manifest.counts["documents_read"] == len(DOCUMENTS) + 3 + 2 + 5 + 2
    assert manifest.counts["duplicates"] == 3 + 2 + 5 + 2
    assert manifest.counts["train_text_bytes"] + manifest.counts["heldout_text_bytes"] == sum(
        len(text.encode()) for text in DOCUMENTS
    )
    assert manifest.train.tokens.max() <= SMALL.block_tokens or manifest.train.documents.min() == 1


def test_stats_are_those_of_the_text(corpus: Path) -> None:
    stats, manifest = corpus_stats(str(corpus)), open_corpus(str(corpus)).manifest
    shares = manifest.unigram[manifest.unigram > 0] / manifest.unigram.sum()
    assert stats.unigram_entropy == pytest.approx(np.sum(shares * np.log(1 / shares)))
    assert stats.train.documents + stats.heldout.documents == len(DOCUMENTS)
    assert sum(stats.document_lengths.values()) == stats.train.documents
    assert stats.train.tokens == manifest.unigram.sum()
    assert 0.2 < stats.train.tokens_per_byte < 0.6


def test_a_finished_corpus_holds_no_scaffolding(corpus: Path) -> None:
    folders = {name.split("/")[0] for name in files_of(corpus)}
    assert folders == {"manifest.json", "train", "heldout", "tokenizer"}


def test_the_heldout_split_is_a_matter_of_the_text_alone(tmp_path: Path, corpus: Path) -> None:
    write_jsonl(tmp_path / "inputs/all.jsonl", DOCUMENTS[::-1])
    build(tmp_path / "inputs", tmp_path / "corpus", SMALL.model_copy(update={"block_tokens": 500}))
    one, other = open_corpus(str(corpus)), open_corpus(str(tmp_path / "corpus"))
    assert set(decoded_documents(one.store, one.manifest.heldout)) == set(
        decoded_documents(other.store, other.manifest.heldout)
    )


@pytest.mark.long
def test_killed_at_any_point_and_continued_it_is_the_same_corpus(tmp_path: Path) -> None:
    inputs = write_jsonl(tmp_path / "inputs/a.jsonl", [text[:1500] for text in DOCUMENTS[:12] * 2]).parent
    update = {"split_bytes": 10_000, "provenance": ProvenanceOptions(id="id")}
    options = SMALL.model_copy(update=update)
    build(inputs, tmp_path / "whole", options)
    expected, new = files_of(tmp_path / "whole"), tmp_path / "new"
    for events in range(100):
        try:
            build(inputs, new, options, killed_after(events))
            break
        except Killed as killed:
            if "clearing up" not in killed.args:
                with pytest.raises(CorpusError, match=r"manifest\.json"):
                    open_corpus(str(new))
            build(inputs, new, options)
            assert files_of(new) == expected
        shutil.rmtree(new)
    assert events > 8
    assert files_of(new) == expected


def test_a_continued_build_does_only_what_is_missing(tmp_path: Path, inputs: Path) -> None:
    with pytest.raises(Killed):
        build(inputs, tmp_path / "new", SMALL, killed_at("writing", 2))
    seen: list[Progress] = []
    build(inputs, tmp_path / "new", SMALL, seen.append)
    reading = [progress.done for progress in seen if progress.stage == "reading"]
    assert reading == [seen[0].total]
    assert next(progress.done for progress in seen if progress.stage == "writing") == 2
    assert all(p.bytes_done <= p.bytes_total for p in seen)


def test_a_shard_cut_short_behind_our_back_is_written_again(tmp_path: Path, inputs: Path, corpus: Path) -> None:
    with pytest.raises(Killed):
        build(inputs, tmp_path / "new", SMALL, killed_at("writing", 3))
    shard = min((tmp_path / "new/train").iterdir())
    shard.write_bytes(shard.read_bytes()[:100])
    build(inputs, tmp_path / "new")
    assert files_of(tmp_path / "new") == files_of(corpus)


def test_a_complete_corpus_is_left_alone(inputs: Path, corpus: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in corpus.rglob("*.*")}
    seen: list[Progress] = []
    manifest = build(inputs, corpus, SMALL, seen.append)
    assert [progress.stage for progress in seen] == ["already built"]
    assert manifest.fingerprint == open_corpus(str(corpus)).manifest.fingerprint
    assert {path: path.stat().st_mtime_ns for path in corpus.rglob("*.*")} == before


@pytest.mark.parametrize("stage", ["comparing", "writing"])
def test_two_builds_of_the_same_corpus_at_once_agree(tmp_path: Path, inputs: Path, corpus: Path, stage: str) -> None:
    others: list[str] = []

    def let_another_overtake(progress: Progress) -> None:
        if progress.stage == stage and not others:
            others.append(build(inputs, tmp_path / "new").fingerprint)

    manifest = build(inputs, tmp_path / "new", SMALL, let_another_overtake)
    assert others == [manifest.fingerprint]
    assert files_of(tmp_path / "new") == files_of(corpus)


def test_a_full_disk_is_named_and_the_build_continues_when_there_is_room(
    tmp_path: Path, inputs: Path, corpus: Path
) -> None:
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (90_000, limit[1]))  # shards of this corpus are larger
    try:
        with pytest.raises(OutOfSpace, match=r"\bspace\b"):
            build(inputs, tmp_path / "new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert "manifest.json" not in files_of(tmp_path / "new")
    build(inputs, tmp_path / "new")
    assert files_of(tmp_path / "new") == files_of(corpus)


@pytest.mark.parametrize("complete", [True, False])
def test_another_build_over_a_corpus_is_refused_with_the_difference(
    tmp_path: Path, inputs: Path, complete: bool
) -> None:
    tokenizer = tokenizer_folder(tmp_path / "tokenizer")
    if complete:
        build(inputs, tmp_path / "new")
    else:
        with pytest.raises(Killed):
            build(inputs, tmp_path / "new", SMALL, killed_at("writing", 1))
    before = files_of(tmp_path / "new")
    other = SMALL.model_copy(update={"block_tokens": 4321})
    with pytest.raises(CorpusError, match=r"block_tokens.*8000.*4321"):
        build(inputs, tmp_path / "new", other)
    with pytest.raises(CorpusError, match=r"input_files\b.*\d+.*\b1\n"):
        build_corpus([f"{inputs}/a.jsonl"], str(tmp_path / "new"), tokenizer, SMALL, ignore_progress)
    save_tokenizer(train_tokenizer("byte_bpe", iter(DOCUMENTS[:5]), 400), str(tmp_path / "other"))
    with pytest.raises(CorpusError, match=r"tokenizer\b.*'[0-9a-f]{64}'"):
        build_corpus([str(inputs)], str(tmp_path / "new"), str(tmp_path / "other"), SMALL, ignore_progress)
    assert files_of(tmp_path / "new") == before


def test_options_that_came_later_are_of_a_corpuss_identity_only_where_they_are_not_as_before() -> None:
    usual = BuildOptions(encoding="UTF8").identity_settings()
    later: dict[str, Any] = {"encoding": "iso-8859-1", "sentences": "zh", "delimiter": ";", "pairs": PairFields()}
    assert not {*later, "words", "provenance", "heldout_rule", "workers"} & usual.keys()
    assert later.keys() <= BuildOptions(**later).identity_settings().keys()
    assert BuildOptions(encoding="iso-8859-1").identity_settings()["encoding"] == "iso8859-1"


@pytest.mark.parametrize(("new", "problem"), [(b"THE", "changed"), (b"another", "JSON")])
def test_inputs_that_change_under_the_build_are_noticed_and_then_read_again(
    tmp_path: Path, new: bytes, problem: str
) -> None:
    path = write_jsonl(tmp_path / "inputs/a.jsonl", DOCUMENTS[:9])

    def change(progress: Progress) -> None:
        if progress.stage == "writing":
            path.write_bytes(path.read_bytes().replace(b"the", new))

    with pytest.raises(InputError, match=rf"a\.jsonl.*{problem}"):
        build(path, tmp_path / "corpus", SMALL, change)
    build(path, tmp_path / "corpus", SMALL)
    build(path, tmp_path / "whole", SMALL)
    assert files_of(tmp_path / "corpus") == files_of(tmp_path / "whole")


def test_the_corpus_keeps_its_tokenizer_and_knows_it_from_others(tmp_path: Path, corpus: Path) -> None:
    opened = open_corpus(str(corpus))
    assert opened.tokenizer().hash == small_tokenizer().hash
    other = train_tokenizer("byte_bpe", iter(DOCUMENTS[:5]), 400)
    with pytest.raises(CorpusError, match=r"tokenizer.*\(600 ids\).*\(400 ids\)"):
        opened.require_tokenizer(other)


def test_documents_are_shown_by_number_across_blocks(corpus: Path) -> None:
    opened = open_corpus(str(corpus))
    expected = decoded_documents(opened.store, opened.manifest.train)
    shown = show_documents(str(corpus), "train", 1, len(expected))
    assert ["".join(document.sentences) for document in shown] == expected[1:]
    assert len({(document.block, document.document) for document in shown}) == len(shown)
    with pytest.raises(CorpusError, match=rf"\b{len(expected)}\b.*\btrain\b"):
        show_documents(str(corpus), "train", len(expected))


@pytest.mark.parametrize(
    "any_store",
    [
        "s3",
        pytest.param("rgw", marks=[pytest.mark.rgw, pytest.mark.long]),
        pytest.param("gs", marks=pytest.mark.long),
        pytest.param("az", marks=[pytest.mark.azurite, pytest.mark.long]),
    ],
    indirect=True,
)
def test_in_and_out_of_a_bucket(any_store: Store, tmp_path: Path) -> None:
    inputs = write_jsonl(tmp_path / "inputs/a.jsonl", DOCUMENTS[:12]).parent
    write_parquet(inputs / "d.parquet", DOCUMENTS[10:16])
    (inputs / "z.txt").write_text(DOCUMENTS[16], "utf-8")
    build(inputs, tmp_path / "corpus")
    for name, data in files_of(inputs).items():
        any_store.put(f"inputs/{name}", data)
    output = any_store.with_prefix("corpus")
    sources = [f"{any_store.uri}/inputs/*.jsonl*", f"{any_store.uri}/inputs/[d-z]*"]
    build_corpus(sources, output.uri, str(tmp_path / "tokenizer"), SMALL, ignore_progress)
    assert verify_corpus(output.uri).damage == ()
    shards = {name: data for name, data in files_of(tmp_path / "corpus").items() if name.endswith(".tar")}
    assert {name: output.get(name) for name in shards} == shards
    assert {entry.key for entry in output.list("build/")} == set()


@pytest.mark.long
def test_the_end_of_a_build_takes_few_requests_and_is_reported(
    tmp_path: Path, inputs: Path, s3: S3Server, faults: FaultProxy
) -> None:
    seen: list[Progress] = []
    output = f"s3://{s3.new_bucket()}/corpus"
    build(inputs, output, SMALL, seen.append)
    methods = [method for method, _, _ in faults.requests]
    assert (methods.count("DELETE"), methods.count("POST")) == (0, 1)
    for stage in ("assembling", "clearing up"):
        last = [progress for progress in seen if progress.stage == stage][-1]
        assert last.done == last.total > 1
        assert last.bytes_done == last.bytes_total > 0


@pytest.mark.parametrize("documents_a_partition", [2_000_000, 50])
def test_any_way_of_cutting_loses_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, documents_a_partition: int
) -> None:
    monkeypatch.setattr(deduplicate, "PARTITION_DOCUMENTS", documents_a_partition)
    texts = [f"Document {i} {hashlib.sha256(str(i % 90).encode()).hexdigest()}." for i in range(300)]
    copies = [text.replace(f"Document {i} ", "") for i, text in enumerate(texts)]
    write_jsonl(tmp_path / "inputs/a.jsonl", copies)
    for split_bytes in (4096, 5000, 8192, 1 << 20):
        options = BuildOptions(split_bytes=split_bytes, heldout_fraction=0.2)
        manifest = build(tmp_path / "inputs", tmp_path / f"{split_bytes}", options)
        assert manifest.counts["duplicates"] == 210
        opened = open_corpus(str(tmp_path / f"{split_bytes}"))
        train = decoded_documents(opened.store, opened.manifest.train)
        assert train == [text for text in copies[:90] if text in set(train)]
        assert sorted(train + decoded_documents(opened.store, opened.manifest.heldout)) == sorted(copies[:90])
