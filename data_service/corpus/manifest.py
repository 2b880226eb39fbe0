"""The corpus manifest: which blocks exist, where, and the hash of each; and the keys of a corpus that is being built.

A corpus exists once its manifest does. Everything under `build/` is deleted then.
"""

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.words import Segmentation
from data_service.store.base import Store
from data_service.store.open import open_store

BUILD = "build/"
CONFIGURATION = "build/configuration.json"
TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class BuildLayout:
    """The keys that the tasks of one build read and write. It is sent to the workers with each task.

    Attributes:
        output: URI of the corpus.
        build: hash of the configuration. Keys under `build/` contain it, so that what a late task of an abandoned build
            writes is never taken for ours.
    """

    output: str
    build: str

    def open(self) -> Store:
        """The store at the corpus root."""
        return open_store(self.output)

    def hashes(self, split: int) -> str:
        """The document hashes of a split, sorted."""
        return f"{BUILD}{self.build}/hashes/{split:06d}.bin"

    def drops(self, partition: int) -> str:
        """The numbers of the later copies among the documents whose hashes fall in one partition."""
        return f"{BUILD}{self.build}/drops/{partition:03d}.bin"

    def unigram(self, split: int) -> str:
        """Token counts of a split's training shard: [vocab_size] int64."""
        return f"{BUILD}{self.build}/unigrams/{split:06d}.bin"

    def words(self, name: str) -> str:
        """A copy of one of the files of words, for the workers."""
        return f"{BUILD}{self.build}/words/{name}"

    def receipt(self, stage: str, task: int) -> str:
        """The receipt of a finished task."""
        return f"{BUILD}{self.build}/receipts/{stage}/{task:06d}.json"


def shard_name(split: int) -> str:
    """The beginning of the names of a split's shards, and of the keys of their samples."""
    return f"{split:06d}"


def shard_key(part: str, split: int) -> str:
    """The shard of a split that goes to `part`: train or heldout."""
    return f"{part}/{shard_name(split)}.tar"


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


MANIFEST = "manifest.json"


@dataclass(frozen=True)
class BlockTable:
    """One split's B blocks, a column per attribute (a 40-billion-token corpus has tens of thousands of rows).

    Attributes:
        shard: [B] int32, index into `shards`.
        offset: [B] int64, byte offset of the block's first tar header in its shard.
        length: [B] int64, bytes from there to the end of the block's last tar member (padding included).
        tokens, sentences, documents: [B] int64 counts.
        digest: B hex digests (blake2b, 16 bytes) of those `length` bytes.
        shards: shard keys relative to the corpus root.
    """

    shard: NDArray[np.int32]
    offset: NDArray[np.int64]
    length: NDArray[np.int64]
    tokens: NDArray[np.int64]
    sentences: NDArray[np.int64]
    documents: NDArray[np.int64]
    digest: tuple[str, ...]
    shards: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.shard)

    def key(self, index: int) -> str:
        """The shard that holds block `index`, relative to the corpus root."""
        return self.shards[int(self.shard[index])]

    def place(self, index: int) -> str:
        """Where block `index` is, for messages: shard, block number in the split, byte range."""
        start = int(self.offset[index])
        return f"{self.key(index)}, block {index}, bytes {start} to {start + int(self.length[index])}"


@dataclass(frozen=True)
class HeldoutRule:
    """What was held out of a corpus.

    Attributes:
        unit: whole documents, or stretches of them between the bounds of paragraphs (in a long paragraph, of
            sentences).
        below: a document is held out if the low word of its hash is below this. A stretch is held out if that is true
            of the paragraph with which it ends.
        length: bytes of a stretch on average.
        trained: low words below `below` that are trained on nevertheless, because their paragraphs end too many
            stretches.
        by_tokens: documents with text unknown to the tokenizer are divided by the hash of their tokens, so that
            documents that differ only in unknown words are on the same side. Only if there are many documents.
    """

    unit: Literal["document", "stretch"]
    below: int
    length: int = 0
    trained: tuple[int, ...] = ()
    by_tokens: bool = False

    def holds_out(self, low: int) -> bool:
        """Whether a document or paragraph with this low word is held out."""
        return low < self.below and low not in self.trained


@dataclass(frozen=True)
class PairTexts:
    """Every document of the corpus is an example: its sentences are query, positive and so many negatives, each a whole
    text."""

    negatives: int

    @property
    def texts(self) -> int:
        """Number of texts of an example."""
        return 2 + self.negatives

    @property
    def names(self) -> tuple[str, ...]:
        """What each of them is."""
        return ("query", "positive", *(f"negative {number + 1}" for number in range(self.negatives)))


@dataclass(frozen=True)
class CorpusManifest:
    """A complete corpus.

    Attributes:
        tokenizer_hash: hash of the tokenizer that made the tokens (`Tokenizer.hash`).
        vocab_size: number of ids of that tokenizer.
        heldout_fraction: share of documents (by document hash) in the held-out split, as it was asked for.
        train, heldout: the blocks of each split.
        unigram: [vocab_size] int64, token counts of the training split.
        shard_sizes, shard_digests: whole-file size and hash per shard key, so that any flipped byte is found.
        counts: documents read, duplicates dropped and the like, for `corpus stats`.
        options: how the corpus was built (inputs, options), for the record and for continuing.
        document_lengths: entry k counts the training documents of 2**k to 2**(k + 1) - 1 tokens.
        skipped: the first hundred bad records that were left out, with file and line or row, and why.
        left_out: the first hundred files among the inputs that were not read, and why.
        tokenizer_files: hash (blake2b, 16 bytes) per key of the tokenizer's copy below the corpus root.
        heldout_rule: what was held out instead, if that share of the documents would have been too little or too much.
        pairs: the texts of an example, in a corpus of pairs; None in a corpus of plain text.
        words: what decided where stored units begin; None where none are stored.
    """

    tokenizer_hash: str
    vocab_size: int
    heldout_fraction: float
    train: BlockTable
    heldout: BlockTable
    unigram: NDArray[np.int64]
    shard_sizes: dict[str, int]
    shard_digests: dict[str, str]
    counts: dict[str, int]
    options: dict[str, object]
    document_lengths: tuple[int, ...] = ()
    tokenizer_files: dict[str, str] = field(default_factory=dict)
    heldout_rule: HeldoutRule | None = None
    skipped: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    pairs: PairTexts | None = None
    words: Segmentation | None = None

    @property
    def word_rules(self) -> int:
        """Which version of `data_service.tokenizers.words` says where words begin: that of the build, 1 or 2."""
        rules = self.options.get("rules")
        return 2 if isinstance(rules, int) and rules >= 2 else 1

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of everything that decides what a run sees: blocks, shards, tokenizer, where words begin.

        It does not cover where the text came from (`options`, `counts`): the same tokens are the same data.
        """
        content = hashlib.sha256()
        identity: list[object] = [self.tokenizer_hash, self.vocab_size, self.shard_sizes, self.shard_digests]
        if (
            self.word_rules > 1
        ):  # the first rules are not named, so that older corpora keep their fingerprints
            identity.append({"words": self.word_rules})
        if self.pairs is not None:
            identity.append({"pairs": self.pairs.negatives})
        if self.words is not None:
            identity.append({"segmentation": self.words.model_dump(mode="json", exclude_none=True)})
        content.update(json.dumps(identity, sort_keys=True).encode())
        for table in (self.train, self.heldout):
            content.update(json.dumps([len(table), table.shards, table.digest]).encode())
            for column in (table.shard, table.offset, table.length):
                content.update(column.astype("<i8").tobytes())
            for column in (table.tokens, table.sentences, table.documents):
                content.update(column.astype("<i8").tobytes())
        content.update(self.unigram.astype("<i8").tobytes())
        return content.hexdigest()


def block_table(
    rows: list[tuple[int, int, int, int, int, int]], digest: list[str], shards: list[str]
) -> BlockTable:
    """A table from rows of (shard, offset, length, tokens, sentences, documents), in block order."""
    columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
    shard, offset, length, tokens, sentences, documents = (np.ascontiguousarray(column) for column in columns)
    return BlockTable(
        shard=shard.astype(np.int32),
        offset=offset,
        length=length,
        tokens=tokens,
        sentences=sentences,
        documents=documents,
        digest=tuple(digest),
        shards=tuple(shards),
    )
