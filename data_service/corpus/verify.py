"""Checks a corpus byte by byte against its manifest and names what is damaged: file, block or gap."""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from data_service.corpus.manifest import BlockTable, CorpusManifest
from data_service.corpus.reader import read_block_bytes, to_block
from data_service.errors import CorruptBlock
from data_service.store.base import Store, digest
from data_service.store.errors import KeyMissing, Truncated

ReportBytes = Callable[[int, int], None]
_SHARDS_AT_ONCE = 4  # each holds one block
_FOLDERS = ("train/", "heldout/", "tokenizer/")


@dataclass(frozen=True)
class Damage:
    """`key` is relative to the corpus root; `problem` says which part of it is wrong, and how."""

    key: str
    problem: str

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}"


@dataclass(frozen=True)
class VerifyReport:
    """What was read, and everything that is wrong with it."""

    shards: int
    blocks: int
    bytes: int
    damage: tuple[Damage, ...]


def verify_files(
    store: Store, manifest: CorpusManifest, report: ReportBytes = lambda read, total: None
) -> VerifyReport:
    """Read every byte that the manifest describes, and look for files that it does not know.

    Args:
        report: is called, by several threads, as bytes were read: how many now, of how many in all.

    Raises:
        StoreError: the store cannot be read. A file that is missing or cut short is damage, not an error.
    """
    total = sum(manifest.shard_sizes.values())

    def tell(read: int) -> None:
        report(read, total)

    with ThreadPoolExecutor(_SHARDS_AT_ONCE) as threads:
        shards = threads.map(
            lambda key: list(_verify_shard(store, manifest, key, tell)), manifest.shard_sizes
        )
        damage = [found for shard in shards for found in shard]
    damage += [*_verify_tokenizer(store, manifest), *_strangers(store, manifest)]
    return VerifyReport(
        shards=len(manifest.shard_sizes),
        blocks=len(manifest.train) + len(manifest.heldout),
        bytes=total,
        damage=tuple(damage),
    )


def _verify_shard(
    store: Store, manifest: CorpusManifest, key: str, tell: Callable[[int], None]
) -> Iterator[Damage]:
    size, expected = store.size(key), manifest.shard_sizes[key]
    if size is None:
        yield Damage(key, "is missing")
        return
    if size != expected:
        yield Damage(key, f"has {size} bytes, the manifest says {expected}")
    whole = hashlib.blake2b(digest_size=16)
    position, sound = 0, size == expected
    table, blocks = _blocks_of(manifest, key)
    for index in blocks:
        start = int(table.offset[index])
        problems = [
            *_verify_gap(store, key, position, start),
            *_verify_block(store, manifest, table, index, whole),
        ]
        yield from problems
        sound = sound and not problems
        position = start + int(table.length[index])
        tell(int(table.length[index]))
    problems = list(_verify_gap(store, key, position, min(size, expected)))
    yield from problems
    whole.update(bytes(max(0, expected - position)))
    if sound and not problems and whole.hexdigest() != manifest.shard_digests[key]:
        yield Damage(key, "its blocks are sound, but the hash of the whole shard is another")


def _blocks_of(manifest: CorpusManifest, key: str) -> tuple[BlockTable, list[int]]:
    """The split that the shard belongs to, and the shard's blocks in the order they lie in it."""
    table = manifest.train if key in manifest.train.shards else manifest.heldout
    rows = (table.shard == table.shards.index(key)).nonzero()[0]
    return table, sorted(rows.tolist(), key=lambda index: int(table.offset[index]))


def _verify_block(
    store: Store, manifest: CorpusManifest, table: BlockTable, index: int, whole: "hashlib.blake2b"
) -> Iterator[Damage]:
    key, place = table.key(index), table.place(index).partition(", ")[2]
    try:
        data = read_block_bytes(store, table, index)
        whole.update(data)
        block = to_block(data, store, table, index)
    except CorruptBlock as error:
        yield Damage(key, error.problem.rpartition(key + ", ")[2])
    except (KeyMissing, Truncated):
        yield Damage(key, f"{place}: the shard ends before")
    else:
        if int(block.tokens.max()) >= manifest.vocab_size:
            yield Damage(key, f"{place}: token {block.tokens.max()} of a vocabulary of {manifest.vocab_size}")


def _verify_gap(store: Store, key: str, start: int, stop: int) -> Iterator[Damage]:
    """What lies outside the blocks is the end of the archive: nothing but zeros."""
    if stop < start:
        yield Damage(key, f"bytes {stop} to {start}: blocks overlap, or the shard ends inside one")
    elif any(store.get_range(key, start, stop - start)):
        yield Damage(key, f"bytes {start} to {stop}, outside any block: they are not zero")


def _verify_tokenizer(store: Store, manifest: CorpusManifest) -> Iterator[Damage]:
    for key, expected in manifest.tokenizer_files.items():
        try:
            if digest(store.get(key)) != expected:
                yield Damage(key, "its bytes do not match the manifest's hash")
        except KeyMissing:
            yield Damage(key, "is missing")


def _strangers(store: Store, manifest: CorpusManifest) -> Iterator[Damage]:
    known = {*manifest.shard_sizes, *manifest.tokenizer_files}
    for folder in _FOLDERS:
        for entry in store.list(folder):
            if entry.key not in known:
                yield Damage(entry.key, "is not in the manifest")
