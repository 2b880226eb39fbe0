"""A built corpus: open it, show its documents as text, and verify every byte of it against the manifest."""

import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.block_columns import COLUMNS_FOLDER, StoredColumns
from data_service.corpus.manifest import MANIFEST_KEY, TOKENIZER_FOLDER, BlockTable, CorpusManifest, PairTexts
from data_service.corpus.manifest_file import load_manifest
from data_service.corpus.parts import with_parts
from data_service.corpus.reader import parse_listed_block, read_block, read_block_bytes
from data_service.corpus.removals import RemovalChain, load_removals
from data_service.errors import CorpusError, CorruptBlock
from data_service.store.base import Store, digest
from data_service.store.errors import KeyMissing, Truncated
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer

SplitName = Literal["train", "heldout"]
SPLITS: tuple[SplitName, ...] = ("train", "heldout")


ReportBytes = Callable[[int, int], None]  # called as (newly read, total), in bytes
_PARALLEL_SHARDS = 4  # number of shards verified in parallel; each needs memory for one block
_CORPUS_FOLDERS = ("train/", "heldout/", "tokenizer/", "provenance/", COLUMNS_FOLDER)  # searched for unlisted files


@dataclass(frozen=True)
class Damage:
    """Damage to one object of a corpus.

    Attributes:
        key: key of the object, relative to the corpus root.
        problem: what is wrong with the object, and where in it.
    """

    key: str
    problem: str

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}"


@dataclass(frozen=True)
class VerifyReport:
    """The result of `verify_corpus`: the numbers of shards, blocks and bytes that were read, and all damage found."""

    shards: int
    blocks: int
    bytes: int
    damage: tuple[Damage, ...]


def _verify_shard(
    store: Store,
    manifest: CorpusManifest,
    key: str,
    shard_blocks: "_ShardBlocks",
    report_block_bytes: Callable[[int], None],
) -> Iterator[Damage]:
    """Yield all damage to the shard `key`. `report_block_bytes`: called with the size of each block read."""
    size, expected = store.size(key), manifest.shard_sizes[key]
    if size is None:
        yield Damage(key, "is missing")
        return
    if size != expected:
        yield Damage(key, f"has {size} bytes, but the manifest says {expected}")
    whole = hashlib.blake2b(digest_size=16)
    position, sound = 0, size == expected
    table = shard_blocks.table
    for index in shard_blocks.blocks.tolist():
        start = int(table.offset[index])
        problems = [
            *_verify_gap(store, key, position, start),
            *_verify_block(store, manifest, table, index, whole),
        ]
        yield from problems
        sound = sound and not problems
        position = start + int(table.length[index])
        report_block_bytes(int(table.length[index]))
    problems = list(_verify_gap(store, key, position, min(size, expected)))
    yield from problems
    whole.update(bytes(max(0, expected - position)))
    if sound and not problems and whole.hexdigest() != manifest.shard_digests[key]:
        yield Damage(key, "its blocks are sound, but the hash of the whole shard differs from the manifest's")


class _ShardBlocks(NamedTuple):
    """The N blocks of one shard. `blocks`: [N] int64, row of each block in `table`, in the order of the shard file."""

    table: BlockTable
    blocks: NDArray[np.int64]


def _blocks_by_shard(table: BlockTable) -> dict[str, _ShardBlocks]:
    """Return the blocks of each shard in the table, by the shard's key."""
    order = np.lexsort((table.offset, table.shard))
    bounds = np.searchsorted(table.shard[order], np.arange(len(table.shards) + 1))
    return {
        key: _ShardBlocks(table, order[bounds[number] : bounds[number + 1]]) for number, key in enumerate(table.shards)
    }


def _verify_block(
    store: Store, manifest: CorpusManifest, table: BlockTable, index: int, whole: "hashlib.blake2b"
) -> Iterator[Damage]:
    """Yield the damage to block `index`. `whole`: hash of the shard, to which the block's bytes are added."""
    key, place = table.block_shard_key(index), table.block_location(index).partition(", ")[2]
    try:
        data = read_block_bytes(store, table, index)
        whole.update(data)
        block = parse_listed_block(data, store, table, index)
    except CorruptBlock as error:
        yield Damage(key, error.problem.rpartition(key + ", ")[2])
    except (KeyMissing, Truncated):
        yield Damage(key, f"{place}: the shard ends before this block does")
    else:
        if int(block.tokens.max()) >= manifest.vocab_size:
            yield Damage(
                key,
                f"{place}: holds token {block.tokens.max()}, but the vocabulary has {manifest.vocab_size} ids",
            )


def _verify_gap(store: Store, key: str, start: int, stop: int) -> Iterator[Damage]:
    """Check bytes `start` to `stop`, which lie outside the blocks: they must be zeros, as at the end of an archive."""
    if stop < start:
        yield Damage(key, f"bytes {stop} to {start}: two blocks overlap, or the shard ends inside a block")
    elif any(store.get_range(key, start, stop - start)):
        yield Damage(key, f"bytes {start} to {stop}, which lie outside any block, are not zero")


def _verify_tokenizer_and_sidecars(store: Store, manifest: CorpusManifest) -> Iterator[Damage]:
    """Yield a `Damage` for each missing or changed tokenizer file and provenance sidecar."""
    sidecars = {key: file.digest for key, file in manifest.provenance.items()}
    for key, expected in (manifest.tokenizer_files | sidecars).items():
        try:
            if digest(store.get(key)) != expected:
                yield Damage(key, "its bytes do not match the manifest's hash")
        except KeyMissing:
            yield Damage(key, "is missing")


def _verify_removals(store: Store, manifest: CorpusManifest) -> Iterator[Damage]:
    """Yield a `Damage` if the list of removed documents is damaged."""
    try:
        load_removals(store, manifest)
    except CorpusError as error:
        key, _, problem = error.problem.removeprefix(f"{store.uri.rstrip('/')}/").partition(" ")
        yield Damage(key, problem.removeprefix("is damaged: "))


def _find_unlisted_files(store: Store, manifest: CorpusManifest) -> Iterator[Damage]:
    tables = (table.columns for table in (manifest.train, manifest.heldout))
    columns = {stored.key for stored in tables if isinstance(stored, StoredColumns)}
    known = {*manifest.shard_sizes, *manifest.tokenizer_files, *manifest.provenance, *columns}
    for folder in _CORPUS_FOLDERS:
        for entry in store.list(folder):
            if entry.key not in known:
                yield Damage(entry.key, "is not in the manifest")


@dataclass(frozen=True)
class Corpus:
    """A corpus whose build is complete: the store at its root, and its manifest."""

    store: Store
    manifest: CorpusManifest

    def table(self, split: SplitName) -> BlockTable:
        """Return the table of all blocks of a split."""
        return self.manifest.train if split == "train" else self.manifest.heldout

    def tokenizer(self) -> Tokenizer:
        """Return the corpus's own copy of its tokenizer.

        Raises:
            CorpusError: the copy is not the tokenizer with which the corpus was built.
            TokenizerError, StoreError: the copy cannot be read.
        """
        tokenizer = load_tokenizer(self.store.with_prefix(TOKENIZER_FOLDER).uri)
        self.require_tokenizer(tokenizer)
        return tokenizer

    def require_tokenizer(self, tokenizer: Tokenizer) -> None:
        """Raise CorpusError if the corpus was not built with `tokenizer`."""
        if tokenizer.hash != self.manifest.tokenizer_hash:
            raise CorpusError(
                f"{self.store.uri} was built with another tokenizer: its manifest says "
                f"{self.manifest.tokenizer_hash[:12]} ({self.manifest.vocab_size} ids), "
                f"the given one is {tokenizer.hash[:12]} ({tokenizer.vocab_size} ids)",
                remedy=f"use the corpus's copy, {self.store.with_prefix(TOKENIZER_FOLDER).uri}, or build with "
                "this tokenizer",
            )


def open_corpus(uri: str) -> Corpus:
    """Return the corpus at a folder or an s3:// prefix.

    Raises:
        CorpusError: there is no corpus, or its manifest is damaged or written by a newer version.
        StoreError: the store cannot be read.
    """
    store = open_store(uri)
    manifest = load_manifest(store)
    return Corpus(with_parts(store, manifest), manifest)


def open_part(corpus: Corpus, number: int) -> Corpus:
    """Return one of the corpora from which a corpus was merged.

    Raises:
        CorpusError: there is no corpus at the part's URI, or another corpus than the one that was merged.
        StoreError: the store cannot be read.
    """
    part = corpus.manifest.parts[number]
    found = open_corpus(part.uri)
    if found.manifest.digest != part.digest:
        raise CorpusError(
            f"{part.uri} is not the corpus that was merged into {corpus.store.uri}",
            remedy="restore this corpus from a copy, or merge the corpora again",
        )
    return found


def verify_corpus(uri: str, report: ReportBytes = lambda read, total: None) -> VerifyReport:
    """Verify every byte of a corpus: manifest, tokenizer, sidecars, removals, and whole shards, padding included. Files
    that the manifest does not list are reported as damage, too.

    `report`: function that is called, from several threads, with the number of bytes just read and the total number.

    Raises:
        CorpusError: the manifest is missing or damaged, so nothing can be verified against it.
        StoreError: the store cannot be read. Missing and truncated files are reported as damage instead.
    """
    corpus = open_corpus(uri)
    store, manifest = corpus.store, corpus.manifest
    total = sum(manifest.shard_sizes.values()) + sum(file.size for file in manifest.provenance.values())

    def report_read_bytes(read: int) -> None:
        report(read, total)

    blocks = {**_blocks_by_shard(manifest.train), **_blocks_by_shard(manifest.heldout)}
    with ThreadPoolExecutor(_PARALLEL_SHARDS) as threads:
        shards = threads.map(
            lambda key: list(_verify_shard(store, manifest, key, blocks[key], report_read_bytes)),
            manifest.shard_sizes,
        )
        damage = [found for shard in shards for found in shard]
    damage += [
        *_verify_tokenizer_and_sidecars(store, manifest),
        *_verify_removals(store, manifest),
        *_find_unlisted_files(store, manifest),
    ]
    if not damage and manifest.fingerprint != manifest.computed_fingerprint:
        damage.append(Damage(MANIFEST_KEY, "the stored fingerprint differs from that of the block tables"))
    return VerifyReport(
        shards=len(manifest.shard_sizes),
        blocks=len(manifest.train) + len(manifest.heldout),
        bytes=total,
        damage=tuple(damage),
    )


@dataclass(frozen=True)
class ShownDocument:
    """A document as training reads it. In a corpus of pairs, a document is an example and its sentences are its texts.

    Attributes:
        shard: key of the shard, relative to the corpus root.
        block: number of the block in its split.
        document: number of the document in its block.
        tokens: number of tokens.
        sentences: texts decoded from the tokens; empty for a removed document.
        pairs: which texts an example has in a corpus of pairs; None in a corpus of plain text.
        removal: number, from 1, of the removal (`removals.py`) that took the document out; None if none did.
    """

    shard: str
    block: int
    document: int
    tokens: int
    sentences: tuple[str, ...]
    pairs: PairTexts | None = None
    removal: int | None = None


def show_documents(uri: str, split: SplitName, index: int, count: int = 1) -> list[ShownDocument]:
    """Return documents `index` to `index + count - 1` of a split, numbered block by block; fewer at the split's end.

    Raises:
        CorpusError: the split has no document `index`, the tokenizer in the corpus is not the one it was built with,
            or its list of removals is damaged.
        CorruptBlock, StoreError: a block cannot be read.
    """
    corpus = open_corpus(uri)
    table = corpus.table(split)
    block, first = locate_document_in_block(corpus, split, index)
    tokenizer, removals = corpus.tokenizer(), load_removals(corpus.store, corpus.manifest)
    shown: list[ShownDocument] = []
    while block < len(table) and len(shown) < count:
        last = first + count - len(shown)
        shown.extend(_show_block(corpus, split, block, range(first, last), tokenizer, removals))
        block, first = block + 1, 0
    return shown


def locate_document_tokens(corpus: Corpus, split: SplitName, index: int) -> tuple[int, int, int]:
    """Return (block, start, stop): document `index` of a split is tokens `start` to `stop - 1` of block `block`.

    Documents are numbered in the order of the split's blocks, as for `show_documents`.

    Raises:
        CorpusError: the split has no document `index`.
        CorruptBlock, StoreError: the block cannot be read.
    """
    number, document = locate_document_in_block(corpus, split, index)
    block = read_block(corpus.store, corpus.table(split), number)
    start, stop = block.sentences[block.documents[document : document + 2]]
    return number, int(start), int(stop)


def locate_document_in_block(corpus: Corpus, split: SplitName, index: int) -> tuple[int, int]:
    """Return (block, document): the block that holds document `index` of a split, and the document's number in it.
    Raises CorpusError: the split has no document `index`."""
    table = corpus.table(split)
    ends = np.cumsum(table.documents)
    total = int(ends[-1]) if len(ends) else 0
    if not 0 <= index < total:
        raise CorpusError(
            f"{corpus.store.uri}: no document {index} in split {split}",
            remedy=f"choose a lower number: the split has {total} documents, numbered from 0",
        )
    block = int(np.searchsorted(ends, index, side="right"))
    return block, index - int(ends[block] - table.documents[block])


def _show_block(
    corpus: Corpus,
    split: SplitName,
    index: int,
    document_numbers: range,
    tokenizer: Tokenizer,
    removals: RemovalChain,
) -> Iterator[ShownDocument]:
    """Yield the documents of block `index` with these numbers in the block; numbers past its last one are skipped."""
    table = corpus.table(split)
    block = read_block(corpus.store, table, index)
    before = int(table.documents[:index].sum())
    for document in range(document_numbers.start, min(document_numbers.stop, len(block.documents) - 1)):
        bounds = block.sentences[block.documents[document] : block.documents[document + 1] + 1]
        removal = removals.removal_number(split, before + document)
        texts = pairwise(bounds) if removal is None else ()
        yield ShownDocument(
            shard=table.block_shard_key(index),
            block=index,
            document=document,
            tokens=int(bounds[-1] - bounds[0]),
            sentences=tuple(tokenizer.decode(block.tokens[start:stop]) for start, stop in texts),
            pairs=corpus.manifest.pairs,
            removal=removal,
        )
