"""A built corpus on disk: open it, check every byte of it, read it as text."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from data_service.corpus.layout import TOKENIZER
from data_service.corpus.manifest import BlockTable, CorpusManifest, PairTexts
from data_service.corpus.manifest_file import load_manifest
from data_service.corpus.reader import read_block
from data_service.corpus.verify import ReportBytes, VerifyReport, verify_files
from data_service.errors import CorpusError
from data_service.store.base import Store
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer

Part = Literal["train", "heldout"]


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
