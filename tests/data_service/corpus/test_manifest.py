"""manifest.json: round trips, damage, other versions."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from data_service.corpus.block_columns import MIN_BLOCKS_STORED_APART
from data_service.corpus.manifest import DTYPES, BlockTable, CorpusManifest, Digests, make_block_table
from data_service.corpus.manifest_file import dump_manifest, load_manifest, parse_manifest, save_manifest
from data_service.errors import CorpusError
from data_service.store.local import LocalStore
from data_service.store.open import open_store


class CountingStore(LocalStore):
    """Counts the bytes of each range that is read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read: list[int] = []

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.read.append(length)
        return super().get_range(key, start, length)

    def listed(self) -> list[str]:
        return [entry.key for entry in self.list()]


STORE = open_store("corpus")
TRAIN = make_block_table(
    [(0, 0, 2048, 100, 9, 2), (1, 0, 1024, 50, 5, 1), (1, 1024, 1024, 7, 1, 1)],
    ["0" * 32, "1" * 32, "a" * 32],
    ["train/000000.tar", "train/000001.tar"],
)


def changed(**columns: NDArray[Any]) -> BlockTable:
    return replace(TRAIN, columns={**TRAIN.columns, **columns})


MANIFEST = CorpusManifest(
    tokenizer_hash="ab" * 32,
    vocab_size=5,
    heldout_fraction=0.25,
    train=TRAIN,
    heldout=make_block_table([], [], []),
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
            with pytest.raises(CorpusError, match=r"/corpus/manifest\.json"):
                parse_manifest(bytes(damaged), STORE)


@pytest.mark.parametrize("length", [0, 1, 60, 200, -1])
def test_a_truncated_manifest_is_caught(length: int) -> None:
    with pytest.raises(CorpusError, match=r"corpus/manifest\.json.*damaged"):
        parse_manifest(dump_manifest(MANIFEST)[:length], STORE)


def test_a_later_version_is_refused_by_its_number() -> None:
    data = dump_manifest(MANIFEST).replace(b'"version":1', b'"version":7', 1)
    with pytest.raises(CorpusError, match=r"corpus/manifest\.json.*newer"):
        parse_manifest(data, STORE)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"unigram": np.array([1])}, "unigram"),
        ({"shard_sizes": {"train/000000.tar": 10240}}, "sizes and hashes"),
        ({"shard_sizes": {"train/000000.tar": 1024, "train/000001.tar": 10240}}, "past the end of its shard"),
        ({"train": changed(digest=TRAIN.columns["digest"][1:])}, "differ in length"),
        ({"train": changed(shard=TRAIN.shard + 1)}, "names shard 2, but there are 2"),
        ({"train": changed(offset=TRAIN.offset - 1)}, "greater than or equal to 0"),
    ],
)
def test_contents_that_contradict_themselves_are_refused(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(CorpusError, match=problem):
        parse_manifest(dump_manifest(replace(MANIFEST, **change)), STORE)


def test_the_fingerprint_is_that_of_the_tokens() -> None:
    same = replace(MANIFEST, options={"inputs": ["elsewhere"]}, counts={})
    assert same.fingerprint == MANIFEST.fingerprint
    other = replace(MANIFEST, train=changed(digest=Digests.from_hex(["5" * 32, *TRAIN.digest[1:]]).raw))
    assert other.fingerprint != MANIFEST.fingerprint
    assert replace(MANIFEST, tokenizer_hash="cd" * 32).fingerprint != MANIFEST.fingerprint


def test_no_manifest_is_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"nothing.*manifest\.json"):
        load_manifest(open_store(tmp_path / "nothing"))


def many(seed: int, blocks: int) -> CorpusManifest:
    """A corpus of so many blocks."""
    draw = np.random.default_rng(seed)
    places = [(n // 64, n % 64 * 100, 100, *draw.integers(1, 1 << 40, 3).tolist()) for n in range(blocks)]
    shards = [f"train/{n:06d}.tar" for n in range(-(-blocks // 64))]
    train = make_block_table(places, [draw.bytes(16).hex() for _ in range(blocks)], shards)
    sizes, digests = dict.fromkeys(shards, 6400), dict.fromkeys(shards, "3" * 32)
    return replace(MANIFEST, train=train, shard_sizes=sizes, shard_digests=digests)


@pytest.mark.long
def test_tables_of_many_blocks_are_stored_apart_and_read_a_column_at_a_time(tmp_path: Path) -> None:
    manifest = many(1, MIN_BLOCKS_STORED_APART)
    store = CountingStore(tmp_path)
    save_manifest(store, manifest)
    loaded = load_manifest(store)
    assert loaded.fingerprint == manifest.fingerprint == loaded.computed_fingerprint
    (size,) = (store.size(key) for key in store.listed() if key.startswith("blocks/train"))
    assert size == 60 * MIN_BLOCKS_STORED_APART
    fresh = load_manifest(store)
    store.read.clear()
    assert fresh.fingerprint == manifest.fingerprint
    assert (len(fresh.train), len(fresh.heldout), store.read) == (MIN_BLOCKS_STORED_APART, 0, [])
    np.testing.assert_array_equal(fresh.train.tokens, manifest.train.tokens)
    assert sum(store.read) == 8 * MIN_BLOCKS_STORED_APART
    for name, kind in DTYPES.items():
        np.testing.assert_array_equal(fresh.train.columns[name], manifest.train.columns[name])
        assert fresh.train.columns[name].dtype == kind
    assert list(fresh.train.digest[5:9]) == list(manifest.train.digest)[5:9]
    few = many(2, MIN_BLOCKS_STORED_APART - 1)
    save_manifest(LocalStore(tmp_path / "few"), few)
    assert not (tmp_path / "few" / "blocks").exists()


@pytest.mark.long
def test_damage_in_a_column_is_found_when_it_is_read_and_names_the_column(tmp_path: Path) -> None:
    manifest = many(3, MIN_BLOCKS_STORED_APART)
    save_manifest(LocalStore(tmp_path), manifest)
    (file,) = (tmp_path / "blocks").glob("train-*.bin")
    data = file.read_bytes()
    ends = np.cumsum([MIN_BLOCKS_STORED_APART * np.dtype(kind).itemsize for kind in DTYPES.values()])
    for position in np.random.default_rng().integers(0, len(data), 12).tolist():
        changed = bytearray(data)
        changed[position] ^= 1 << (position % 8)
        file.write_bytes(changed)
        hit = list(DTYPES)[int(np.searchsorted(ends, position, side="right"))]
        table = load_manifest(LocalStore(tmp_path)).train
        for name in DTYPES:
            if name != hit:
                np.testing.assert_array_equal(table.columns[name], manifest.train.columns[name])
        with pytest.raises(CorpusError, match=f"{file.name}.*column {hit}"):
            table.columns[hit]
    file.write_bytes(data[:-1])
    with pytest.raises(CorpusError, match=file.name):
        load_manifest(LocalStore(tmp_path)).train.columns["digest"]
    file.unlink()
    with pytest.raises(CorpusError, match=file.name):
        load_manifest(LocalStore(tmp_path)).train.columns["shard"]
