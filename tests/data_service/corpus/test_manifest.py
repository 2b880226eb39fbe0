"""manifest.json: round trips, damage, other versions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_service.corpus.manifest import CorpusManifest, block_table
from data_service.corpus.manifest_file import dump_manifest, load_manifest, parse_manifest, save_manifest
from data_service.errors import CorpusError
from data_service.store.open import open_store

TRAIN = block_table(
    [(0, 0, 2048, 100, 9, 2), (1, 0, 1024, 50, 5, 1), (1, 1024, 1024, 7, 1, 1)],
    ["0" * 32, "1" * 32, "a" * 32],
    ["train/000000.tar", "train/000001.tar"],
)
MANIFEST = CorpusManifest(
    tokenizer_hash="ab" * 32,
    vocab_size=5,
    heldout_fraction=0.25,
    train=TRAIN,
    heldout=block_table([], [], []),
    unigram=np.array([100, 50, 0, 7, 0], dtype=np.int64),
    shard_sizes={"train/000000.tar": 10240, "train/000001.tar": 10240},
    shard_digests={"train/000000.tar": "2" * 32, "train/000001.tar": "3" * 32},
    counts={"duplicates": 3},
    options={"inputs": ["é"], "block_tokens": 100},
    document_lengths=(0, 2, 1),
    tokenizer_files={"tokenizer/tokenizer.json": "4" * 32},
)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    save_manifest(open_store(tmp_path), MANIFEST)
    loaded = load_manifest(open_store(tmp_path))
    assert dump_manifest(loaded) == dump_manifest(MANIFEST)
    assert loaded.fingerprint == MANIFEST.fingerprint
    np.testing.assert_array_equal(loaded.train.offset, TRAIN.offset)
    assert (loaded.train.shard.dtype, loaded.train.tokens.dtype) == (np.dtype(np.int32), np.dtype(np.int64))
    assert loaded.train.shards == TRAIN.shards
    assert loaded.options == MANIFEST.options
    assert len(loaded.heldout) == 0


def test_a_flipped_byte_anywhere_is_caught() -> None:
    data = dump_manifest(MANIFEST)
    for position in range(len(data)):
        for bit in (0, 5):  # the second one changes case, which JSON's numbers and escapes would forgive
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorpusError, match=r"^corpus/manifest\.json"):
                parse_manifest(bytes(damaged), "corpus/manifest.json")


@pytest.mark.parametrize("length", [0, 1, 60, 200, -1])
def test_a_truncated_manifest_is_caught(length: int) -> None:
    with pytest.raises(CorpusError, match=r"corpus/manifest\.json.*damaged"):
        parse_manifest(dump_manifest(MANIFEST)[:length], "corpus/manifest.json")


def test_a_later_version_is_refused_by_its_number() -> None:
    data = dump_manifest(MANIFEST).replace(b'"version":1', b'"version":4', 1)
    with pytest.raises(CorpusError, match=r"corpus/manifest\.json.*newer"):
        parse_manifest(data, "corpus/manifest.json")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"unigram": np.array([1])}, "unigram"),
        ({"shard_sizes": {"train/000000.tar": 10240}}, "sizes and hashes"),
        ({"shard_sizes": {"train/000000.tar": 1024, "train/000001.tar": 10240}}, "ends after its shard"),
        ({"train": replace(TRAIN, digest=TRAIN.digest[1:])}, "differ in length"),
        ({"train": replace(TRAIN, digest=("x" * 32, *TRAIN.digest[1:]))}, "pattern"),
        ({"train": replace(TRAIN, shard=TRAIN.shard + 1)}, "names shard 2 of 2"),
        ({"train": replace(TRAIN, offset=TRAIN.offset - 1)}, "greater than or equal to 0"),
    ],
)
def test_contents_that_contradict_themselves_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(CorpusError, match=problem):
        parse_manifest(dump_manifest(replace(MANIFEST, **change)), "corpus/manifest.json")


def test_the_fingerprint_is_that_of_the_tokens() -> None:
    same = replace(MANIFEST, options={"inputs": ["elsewhere"]}, counts={})
    assert same.fingerprint == MANIFEST.fingerprint
    other = replace(MANIFEST, train=replace(TRAIN, digest=("5" * 32, *TRAIN.digest[1:])))
    assert other.fingerprint != MANIFEST.fingerprint
    assert replace(MANIFEST, tokenizer_hash="cd" * 32).fingerprint != MANIFEST.fingerprint


def test_no_manifest_is_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"nothing.*manifest\.json"):
        load_manifest(open_store(tmp_path / "nothing"))
