"""A built corpus on disk: open it, check every byte of it, count it, read it as text."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from data_service.errors import CorpusError, PlanError
from data_service.ingest.layout import TOKENIZER
from data_service.radius import Radius, corpus_radius
from data_service.shards.manifest import BlockTable, HeldoutRule, Manifest, PairTexts
from data_service.shards.manifest_file import load_manifest
from data_service.shards.reader import read_block
from data_service.shards.verify import VerifyReport, verify_files
from data_service.store.base import Store
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer

Part = Literal["train", "heldout"]


@dataclass(frozen=True)
class Corpus:
    """A complete corpus: the store at its root, and its manifest."""

    store: Store
    manifest: Manifest

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


def verify_corpus(uri: str) -> VerifyReport:
    """Read and check every byte: manifest, tokenizer, blocks, and what lies between and behind them.

    Raises:
        CorpusError: the manifest itself is missing or damaged, so there is nothing to check the rest against.
        StoreError: the store cannot be read.
    """
    corpus = open_corpus(uri)
    return verify_files(corpus.store, corpus.manifest)


@dataclass(frozen=True)
class SplitStats:
    """One split's counts; `text_bytes` is the UTF-8 size of its documents as they were read."""

    blocks: int
    documents: int
    sentences: int
    tokens: int
    text_bytes: int

    @property
    def tokens_per_byte(self) -> float:
        return self.tokens / self.text_bytes if self.text_bytes else 0.0


@dataclass(frozen=True)
class CorpusStats:
    """What a corpus holds, from its manifest alone.

    Attributes:
        counts: documents read; how many were empty, duplicates, without tokens, or had bad bytes replaced; bad records.
        unigram_entropy: nats a token of the training split: the loss of guessing by frequency.
        skipped: the first hundred bad records that were left out, with file and place.
        pairs: texts of an example in a corpus of pairs, whose documents are examples; None in one of text.
        document_lengths: {n: training documents of n to 2n - 1 tokens}, n a power of two.
        radius: of the shuffle of training rows; None where an epoch has less than a batch.
        heldout_rule: what was held out in place of the share of documents that was asked for.
    """

    train: SplitStats
    heldout: SplitStats
    vocab_size: int
    counts: dict[str, int]
    unigram_entropy: float
    document_lengths: dict[int, int]
    radius: Radius | None
    heldout_rule: HeldoutRule | None
    skipped: tuple[str, ...]
    pairs: PairTexts | None = None


def corpus_stats(uri: str, *, batch: int = 8192, length: int = 512) -> CorpusStats:
    """Counts of a corpus, and how wide batches of so many rows of so many tokens reach in it. Reads the manifest and
    nothing else. Raises as `open_corpus`.
    """
    manifest = open_corpus(uri).manifest
    shares = manifest.unigram[manifest.unigram > 0] / max(1, manifest.unigram.sum())
    return CorpusStats(
        train=_split_stats(manifest.train, manifest.counts.get("train_text_bytes", 0)),
        heldout=_split_stats(manifest.heldout, manifest.counts.get("heldout_text_bytes", 0)),
        vocab_size=manifest.vocab_size,
        counts=manifest.counts,
        unigram_entropy=float(-(shares * np.log(shares)).sum()),
        document_lengths={1 << k: count for k, count in enumerate(manifest.document_lengths) if count},
        radius=_radius(manifest, batch, length),
        heldout_rule=manifest.heldout_rule,
        skipped=manifest.skipped,
        pairs=manifest.pairs,
    )


def _radius(manifest: Manifest, batch: int, length: int) -> Radius | None:
    pairs = manifest.pairs is not None
    try:
        return corpus_radius([manifest.train], batch=batch, length=length, spread=True, pairs=pairs)
    except PlanError:  # smaller than a batch
        return None


def _split_stats(table: BlockTable, text_bytes: int) -> SplitStats:
    return SplitStats(
        blocks=len(table),
        documents=int(table.documents.sum()),
        sentences=int(table.sentences.sum()),
        tokens=int(table.tokens.sum()),
        text_bytes=text_bytes,
    )


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
        documents = list(_show_block(corpus, split, block, tokenizer, first, count - len(shown)))
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
            table.key(index), index, document, int(bounds[-1] - bounds[0]), sentences, corpus.manifest.pairs
        )
