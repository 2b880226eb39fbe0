"""A built corpus on disk: open it, read it as text, and check every byte of it against the manifest, which names what
is damaged: file, block or gap.
"""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from data_service.corpus.manifest import TOKENIZER, BlockTable, CorpusManifest, PairTexts
from data_service.corpus.manifest_file import load_manifest
from data_service.corpus.reader import read_block, read_block_bytes, to_block
from data_service.errors import CorpusError, CorruptBlock
from data_service.store.base import Store, digest
from data_service.store.errors import KeyMissing, Truncated
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer

Part = Literal["train", "heldout"]


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


@dataclass(frozen=True)
class Corpus:
    """A complete corpus: the store at its root, and its manifest."""

    store: Store
    manifest: CorpusManifest

    def table(self, split: Part) -> BlockTable:
        """The blocks of the training or the held-out split."""
        return self.manifest.train if split == "train" else self.manifest.heldout

    def tokenizer(self) -> Tokenizer:
        """The corpus's own copy of its tokenizer.

        Raises:
            CorpusError: the copy is not the tokenizer that made the tokens.
            TokenizerError, StoreError: the copy cannot be read.
        """
        tokenizer = load_tokenizer(self.store.at(TOKENIZER).uri)
        self.require_tokenizer(tokenizer)
        return tokenizer

    def require_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raises CorpusError unless `tokenizer` gives the ids that this corpus is written in."""
        if tokenizer.hash != self.manifest.tokenizer_hash:
            raise CorpusError(
                f"{self.store.uri} was built with another tokenizer: its manifest says "
                f"{self.manifest.tokenizer_hash[:12]} ({self.manifest.vocab_size} ids), "
                f"this one is {tokenizer.hash[:12]} ({tokenizer.vocab_size} ids)",
                remedy=f"use its copy, {self.store.at(TOKENIZER).uri}, or build with this tokenizer",
            )


def open_corpus(uri: str) -> Corpus:
    """The corpus at a folder or s3:// prefix.

    Raises:
        CorpusError: no corpus there, or its manifest is damaged or of another version.
        StoreError: the store cannot be read.
    """
    store = open_store(uri)
    return Corpus(store, load_manifest(store))


def verify_corpus(uri: str, report: ReportBytes = lambda read, total: None) -> VerifyReport:
    """Read and check every byte: manifest, tokenizer, blocks, and what lies between and behind them.

    `report` as in `verify_files`.

    Raises:
        CorpusError: the manifest itself is missing or damaged, so there is nothing to check the rest against.
        StoreError: the store cannot be read.
    """
    corpus = open_corpus(uri)
    return verify_files(corpus.store, corpus.manifest, report)


@dataclass(frozen=True)
class ShownDocument:
    """A document as training sees it: where it lies, and its sentences decoded from their tokens; of a corpus of
    `pairs`, an example and its texts."""

    shard: str
    block: int
    document: int
    tokens: int
    sentences: tuple[str, ...]
    pairs: PairTexts | None = None


def show_documents(uri: str, split: Part, index: int, count: int = 1) -> list[ShownDocument]:
    """`count` documents of a split from number `index` on, in the order they lie in its blocks.

    Raises:
        CorpusError: the split has fewer documents, or holds a tokenizer that is not its own.
        CorruptBlock, StoreError: a block that cannot be read.
    """
    corpus = open_corpus(uri)
    table = corpus.table(split)
    ends = np.cumsum(table.documents)
    total = int(ends[-1]) if len(ends) else 0
    if not 0 <= index < total:
        raise CorpusError(
            f"{corpus.store.uri}: no document {index} in split {split}",
            remedy=f"it has {total} documents, numbered from 0",
        )
    tokenizer = corpus.tokenizer()
    shown: list[ShownDocument] = []
    block = int(np.searchsorted(ends, index, side="right"))
    first = index - int(ends[block] - table.documents[block])
    while block < len(table) and len(shown) < count:
        documents = list(
            _show_block(
                corpus, split, index=block, tokenizer=tokenizer, first=first, count=count - len(shown)
            )
        )
        shown.extend(documents)
        block, first = block + 1, 0
    return shown


def _show_block(
    corpus: Corpus, split: Part, index: int, tokenizer: Tokenizer, first: int, count: int
) -> Iterator[ShownDocument]:
    table = corpus.table(split)
    block = read_block(corpus.store, table, index)
    for document in range(first, min(first + count, len(block.documents) - 1)):
        bounds = block.sentences[block.documents[document] : block.documents[document + 1] + 1]
        sentences = tuple(tokenizer.decode(block.tokens[start:stop]) for start, stop in pairwise(bounds))
        yield ShownDocument(
            shard=table.key(index),
            block=index,
            document=document,
            tokens=int(bounds[-1] - bounds[0]),
            sentences=sentences,
            pairs=corpus.manifest.pairs,
        )
