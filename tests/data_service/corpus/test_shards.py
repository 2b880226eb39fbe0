"""A block written and read back, by us and by stock webdataset."""

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.corpus.manifest import DTYPES, BlockTable
from data_service.corpus.reader import parse_block, read_block
from data_service.corpus.writer import ShardWriter, WrittenShard, concatenate_shard_tables
from data_service.errors import CorruptBlock
from data_service.store.base import digest
from data_service.store.open import open_store
from data_service.types import Block
from tests.support.data.corpora import block_of

BLOCKS = [block_of([[3, 1], [7]]), block_of([[500] * 40]), block_of([[1]])]
shapes = st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=5), min_size=1, max_size=20)


def write_shard(path: Path, blocks: list[Block]) -> WrittenShard:
    writer = ShardWriter(path, "000007")
    for block in blocks:
        writer.write(block)
    return writer.finish()


def table_of(shard: WrittenShard, key: str) -> BlockTable:
    return concatenate_shard_tables({key: shard})


def assert_same(found: Block, expected: Block) -> None:
    for name in ("tokens", "sentences", "documents"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert getattr(found, name).dtype == getattr(expected, name).dtype


@pytest.mark.long
@settings(deadline=None, max_examples=50)
@given(st.lists(shapes, min_size=1, max_size=4), st.sampled_from([np.uint16, np.uint32]))
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory,
    shapes: list[list[list[int]]],
    dtype: type[np.unsignedinteger],
) -> None:
    folder = tmp_path_factory.mktemp("shard")
    blocks = [replace(block, tokens=block.tokens.astype(dtype)) for block in map(block_of, shapes)]
    table = table_of(write_shard(folder / "s.tar", blocks), "s.tar")
    for index, block in enumerate(blocks):
        assert_same(read_block(open_store(folder), table, index), block)


def test_the_same_blocks_are_the_same_bytes(tmp_path: Path) -> None:
    first = write_shard(tmp_path / "1.tar", BLOCKS)
    second = write_shard(tmp_path / "2.tar", BLOCKS)
    assert first == second
    assert (tmp_path / "1.tar").read_bytes() == (tmp_path / "2.tar").read_bytes()
    assert first.size == (tmp_path / "1.tar").stat().st_size


def test_stock_webdataset_reads_a_shard(tmp_path: Path) -> None:
    import webdataset

    write_shard(tmp_path / "s.tar", BLOCKS)
    samples = list(webdataset.WebDataset(str(tmp_path / "s.tar"), shardshuffle=False).decode())
    assert [sample["__key__"] for sample in samples] == ["000007-00000", "000007-00001", "000007-00002"]
    for sample, block in zip(samples, BLOCKS, strict=True):
        assert_same(Block(*(sample[f"{name}.npy"] for name in ("tokens", "sentences", "documents"))), block)


def test_arrays_are_read_only_views_of_the_bytes_read(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "s.tar", BLOCKS)
    data = (tmp_path / "s.tar").read_bytes()[: int(shard.blocks["length"][0])]
    block = parse_block(data, "here")
    whole = np.frombuffer(data, dtype=np.uint8)
    assert np.shares_memory(block.tokens, whole)
    assert np.shares_memory(block.sentences, whole)
    assert not block.tokens.flags.writeable


def test_blocks_are_read_without_python_s_parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ast`, which NumPy reads headers with, fails at random in threads before CPython 3.11.8."""
    shard = write_shard(tmp_path / "s.tar", BLOCKS[:1])

    def fails(*_: object) -> None:
        raise SystemError("AST constructor recursion depth mismatch")

    monkeypatch.setattr(ast, "literal_eval", fails)
    data = (tmp_path / "s.tar").read_bytes()[: int(shard.blocks["length"][0])]
    assert_same(parse_block(data, "here"), BLOCKS[0])


def test_damage_at_rest_names_shard_block_and_bytes(tmp_path: Path) -> None:
    shard = write_shard(tmp_path / "s.tar", BLOCKS)
    start, length = (int(shard.blocks[name][1]) for name in ("offset", "length"))
    data = bytearray((tmp_path / "s.tar").read_bytes())
    data[start + length // 2] ^= 1
    (tmp_path / "s.tar").write_bytes(data)
    table = table_of(shard, "s.tar")
    assert_same(read_block(open_store(tmp_path), table, 0), BLOCKS[0])
    place = f"s.tar, block 1, bytes {start} to {start + length}"
    with pytest.raises(CorruptBlock, match=place):
        read_block(open_store(tmp_path), table, 1)


@pytest.mark.parametrize(
    "damage", ["empty", "short", "no header", "pickled", "boundaries", "two-dimensional", "floats"]
)
def test_bytes_that_are_no_block_are_refused(tmp_path: Path, damage: str) -> None:
    block = BLOCKS[0]
    broken = {
        "pickled": Block(np.array([{}, {}], dtype=object), block.sentences, block.documents),
        "boundaries": Block(block.tokens, block.sentences + 1, block.documents),
        "two-dimensional": Block(block.tokens.reshape(1, -1), block.sentences, block.documents),
        "floats": Block(block.tokens.astype(np.float32), block.sentences, block.documents),  # type: ignore[arg-type]
    }
    shard = write_shard(tmp_path / "s.tar", [broken.get(damage, block)])
    data = (tmp_path / "s.tar").read_bytes()[: int(shard.blocks["length"][0])]
    data = {"empty": b"", "short": data[:600], "no header": b"x" * len(data)}.get(damage, data)
    with pytest.raises(CorruptBlock, match=r"here: .*\n  remedy"):
        parse_block(data, "here")


def test_tables_of_shards_are_joined_in_their_order(tmp_path: Path) -> None:
    keys = [f"train/{number:06d}.tar" for number in range(4)]
    shards = {key: write_shard(tmp_path / f"{n}.tar", BLOCKS[:n]) for n, key in enumerate(keys)}
    offsets = [int(offset) for shard in shards.values() for offset in shard.blocks["offset"]]
    data = [(tmp_path / f"{n}.tar").read_bytes() for n in range(4)]
    joined = concatenate_shard_tables(shards)
    assert (len(joined), joined.shards) == (6, tuple(keys))
    assert joined.shard.tolist() == [1, 2, 2, 3, 3, 3]
    assert joined.offset.tolist() == offsets
    for index, block in enumerate([*BLOCKS[:1], *BLOCKS[:2], *BLOCKS]):
        start = int(joined.offset[index])
        stored = data[joined.shard[index]][start : start + int(joined.length[index])]
        assert digest(stored) == joined.digest[index]
        assert_same(parse_block(stored, "here"), block)
    assert {name: column.dtype.str for name, column in joined.columns.items()} == DTYPES
