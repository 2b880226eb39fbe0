"""What a writer reports of a shard, kept in receipts until it becomes rows of the manifest."""

from dataclasses import dataclass


@dataclass(frozen=True)
class WrittenBlock:
    """One block: bytes [offset, offset + length) of its shard, counts, blake2b hash (16 bytes, hex)."""

    offset: int
    length: int
    tokens: int
    sentences: int
    documents: int
    digest: str


@dataclass(frozen=True)
class WrittenShard:
    """A closed shard: size in bytes, hash of all of them, its blocks in order."""

    size: int
    digest: str
    blocks: tuple[WrittenBlock, ...]
