"""The second pass over a split: its kept documents are tokenised, put into blocks, and written to one shard for
training and one for held-out text.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict

from data_service.corpus.manifest import (
    TOKENIZER_FOLDER,
    BuildLayout,
    HeldoutRule,
    StoredFile,
    shard_key,
    shard_stem,
    sidecar_key,
)
from data_service.corpus.origin import ValueCounts
from data_service.corpus.provenance import Provenance
from data_service.corpus.sidecar import DocumentOrigin, SidecarWriter
from data_service.corpus.words import Segmentation, UnitFinder
from data_service.corpus.writer import ShardWriter, WrittenShard
from data_service.errors import CorpusError
from data_service.ingest.blocks import (
    BATCH_CHARACTERS,
    BlockBuilder,
    EncodedDocument,
    encode_documents,
    encode_examples,
)
from data_service.ingest.deduplicate import ORDINAL_DTYPE, KeptDocuments, read_kept_documents
from data_service.ingest.heldout import low_word, split_heldout_parts
from data_service.ingest.records import TextRecord
from data_service.ingest.scan import hash_tokens
from data_service.ingest.tasks import SplitTask, TaskReceipt
from data_service.processes import temporary_folder
from data_service.store.base import Store
from data_service.store.local import report_full_disk
from data_service.tokenizers.load import load_cached_tokenizer
from data_service.tokenizers.loss import LossMeter, TextLoss
from data_service.tokenizers.quick import TextEncoder
from data_service.tokenizers.tokenizer import Tokenizer
from data_service.types import Level

LENGTH_BINS = 40  # bins of a histogram of documents' lengths in tokens, by powers of two

# A document, a stretch of a document, or an example; and whether it is held out.
_Piece = tuple[TextRecord, bool]


class PartSummary(BaseModel):
    """The content of one part of a split: train or heldout.

    Attributes:
        shard: shard that was written; None if the part has no document.
        text_bytes: number of UTF-8 bytes of its documents' text.
        lengths: numbers of its documents by length; entry k counts those of 2**k to 2**(k + 1) - 1 tokens.
        sidecar: sidecar that was written; None without provenance.
        values: numbers of documents and tokens by source, licence and language.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    shard: WrittenShard | None
    text_bytes: int
    lengths: list[int]
    sidecar: StoredFile | None = None
    values: ValueCounts = {}


class PartWriter:
    """Writes the blocks of one part (train or heldout) to `path`, with units of the given `levels`.

    The file is created with the first block, and its sidecar next to it with the first document whose provenance is
    known. `unigram`: [vocab_size] int64, token counts of the part.
    """

    def __init__(
        self, path: Path, name: str, vocab_size: int, block_tokens: int, levels: tuple[Level, ...] = ()
    ) -> None:
        self.path = path
        self.unigram = np.zeros(vocab_size, dtype=np.int64)
        self._name = name
        self._block_tokens = block_tokens
        self._builder = BlockBuilder(levels)
        self._writer: ShardWriter | None = None
        self.sidecar = SidecarWriter(path.with_suffix(".parquet"))
        self._blocks = self._documents = 0
        self._text_bytes = 0
        self._lengths = [0] * LENGTH_BINS

    def close(self) -> None:
        """Close the files, finished or not."""
        if self._writer is not None:
            self._writer.close()
        self.sidecar.close()

    def add(self, document: EncodedDocument, text_bytes: int, provenance: Provenance | None = None) -> None:
        """Append a document of at least one token. A document longer than a block gets a block of its own."""
        if self._builder.tokens and self._builder.tokens + len(document.tokens) > self._block_tokens:
            self._write_block()
        if provenance is not None:
            start, length = self._builder.tokens, len(document.tokens)
            self.sidecar.add(DocumentOrigin(self._blocks, self._documents, start, length, provenance))
        self._builder.add(document)
        self._documents += 1
        self._text_bytes += text_bytes
        self._lengths[len(document.tokens).bit_length() - 1] += 1

    def finish(self) -> PartSummary:
        """Write the last block and close the shard; return the summary of the part."""
        if self._builder.tokens:
            self._write_block()
        shard = self._writer.finish() if self._writer is not None else None
        return PartSummary(
            shard=shard,
            text_bytes=self._text_bytes,
            lengths=self._lengths,
            sidecar=self.sidecar.finish(),
            values=self.sidecar.counter.counts(),
        )

    def _write_block(self) -> None:
        block = self._builder.pop_block()
        if self._writer is None:
            self._writer = ShardWriter(self.path, self._name)
        self._writer.write(block)
        self._blocks, self._documents = self._blocks + 1, 0
        self.unigram += np.bincount(block.tokens, minlength=len(self.unigram))


@dataclass(frozen=True)
class WriteTask(SplitTask):
    """The task of writing the shards of a split.

    `kept`: documents that are not copies; `heldout`: held-out rule; `words`: how units (such as words) are found.
    """

    kept: KeptDocuments
    tokenizer_hash: str
    heldout: HeldoutRule
    words: Segmentation | None = None

    stage: ClassVar[str] = "write"


class WriteReceipt(TaskReceipt):
    """The shards of a split.

    Attributes:
        train, heldout: content of each part.
        duplicates: number of documents that are left out as copies of earlier ones.
        without_tokens: number of documents whose text gives no tokens.
        moved: number of sentences whose first character is inside a token (`EncodedDocument.moved`).
        cuts: number of cuts inside long texts that may have changed tokens.
        loss: text that the tokenizer loses.
        encoded_by: number of texts that each library tokenised.
    """

    train: PartSummary
    heldout: PartSummary
    duplicates: int
    without_tokens: int
    moved: int
    cuts: int
    loss: TextLoss
    encoded_by: dict[str, int]


def write_split(task: WriteTask, store: Store) -> WriteReceipt:
    """Write a split's shards; return the receipt. Needs memory for two blocks and the text of a streamed piece.

    Raises:
        InputError: the text changed since the first pass; otherwise as in `read_documents`.
        StoreError: a shard cannot be stored. OutOfSpace also if the local temporary folder is full.
    """
    tokenizer = _load_tokenizer(store.with_prefix(TOKENIZER_FOLDER).uri, task.tokenizer_hash)
    finder = _load_unit_finder(task.layout, task.words) if task.words is not None else None
    levels = () if finder is None else finder.levels
    # Shards are written to a local file before they are stored.
    with temporary_folder("build") as folder, report_full_disk(folder):
        name, block_tokens = shard_stem(task.index), task.options.block_tokens
        train, heldout = (
            PartWriter(Path(folder, f"{part}.tar"), name, tokenizer.vocab_size, block_tokens, levels)
            for part in ("train", "heldout")
        )
        with closing(train), closing(heldout):
            filled = _encode_into_parts(task, store, tokenizer, finder, parts=(train, heldout))
            summaries = (train.finish(), heldout.finish())
            files = _store_parts(store, task, (train, heldout), summaries)
    return WriteReceipt(
        source=task.source,
        files=files,
        train=summaries[0],
        heldout=summaries[1],
        duplicates=sum(part.length for part in task.kept.drops) // ORDINAL_DTYPE.itemsize,
        without_tokens=filled.without_tokens,
        moved=filled.moved,
        cuts=filled.meter.cuts,
        loss=filled.meter.total(),
        encoded_by=dict(filled.encoder.counts),
    )


@dataclass
class _EncodingCounts:
    """Counts of the documents that were put into the parts. See `WriteReceipt`."""

    encoder: TextEncoder
    meter: LossMeter
    without_tokens: int = 0
    moved: int = 0


def _encode_into_parts(
    task: WriteTask,
    store: Store,
    tokenizer: Tokenizer,
    finder: UnitFinder | None,
    *,
    parts: tuple[PartWriter, PartWriter],
) -> _EncodingCounts:
    """Put every kept document, or each of its stretches, into its part; return the counts."""
    filled = _EncodingCounts(TextEncoder(tokenizer, task.split.size), LossMeter(tokenizer))
    for batch in _batches(_read_pieces(task, store)):
        encoded = _encode_pieces(task, filled, finder, batch)
        for (piece, heldout), document in zip(batch, encoded, strict=True):
            if not len(document.tokens):
                filled.without_tokens += 1
                continue
            filled.moved += document.moved
            # Texts that differ only in unknown words have equal tokens, whose hash decides (for pairs, the query's).
            deciding = document.tokens if task.options.pairs is None else document.tokens[: document.lengths[0]]
            if task.heldout.by_tokens and piece.cluster_name is None and tokenizer.special.unk in deciding:
                heldout = task.heldout.holds_out(low_word(hash_tokens(deciding)))
            parts[heldout].add(document, piece.size, piece.provenance)
    return filled


def _read_pieces(task: WriteTask, store: Store) -> Iterator[_Piece]:
    """Yield the pieces of all kept documents. Word marks are divided with the text: one for each visible character."""
    for document, digest in read_kept_documents(task, task.kept, store):
        if document.others:
            yield document, task.heldout.holds_out(low_word(digest))
            continue
        words = document.words
        for text, heldout in split_heldout_parts(task.heldout, document.text, digest):
            size = sum(map(len, text.split())) if words else 0
            yield replace(document, text=text, words=words[:size]), heldout
            words = words[size:]


def _encode_pieces(
    task: WriteTask, filled: _EncodingCounts, finder: UnitFinder | None, batch: list[_Piece]
) -> list[EncodedDocument]:
    encoded = task.options.text_to_encode
    if task.options.pairs is not None:
        examples = [tuple(map(encoded, piece.texts)) for piece, _ in batch]
        return encode_examples(filled.encoder, examples, filled.meter)
    return encode_documents(
        filled.encoder,
        [encoded(piece.text) for piece, _ in batch],
        finder,
        [piece.words for piece, _ in batch],
        language=task.options.sentences,
        meter=filled.meter,
    )


def _batches(pieces: Iterator[_Piece]) -> Iterator[list[_Piece]]:
    """Yield the pieces in lists of about `BATCH_CHARACTERS` characters, which are encoded together."""
    batch: list[_Piece] = []
    characters = 0
    for piece, heldout in pieces:
        batch.append((piece, heldout))
        characters += sum(map(len, piece.texts))
        if characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _store_parts(
    store: Store,
    task: WriteTask,
    parts: tuple[PartWriter, PartWriter],
    summaries: tuple[PartSummary, PartSummary],
) -> dict[str, int]:
    """Upload the files that the parts wrote; return the sizes of all stored objects, by key."""
    files: dict[str, int] = {}
    for name, part, summary in zip(("train", "heldout"), parts, summaries, strict=True):
        if summary.shard is not None:
            key = shard_key(name, task.index)
            store.put_file(key, part.path)
            files[key] = summary.shard.size
        if summary.sidecar is not None:
            key = sidecar_key(shard_key(name, task.index))
            store.put_file(key, part.sidecar.path)
            files[key] = summary.sidecar.size
    key, unigram = task.layout.unigram_key(task.index), parts[0].unigram.tobytes()
    store.put(key, unigram)
    return files | {key: len(unigram)}


@lru_cache(maxsize=1)
def _load_tokenizer(uri: str, expected: str) -> Tokenizer:
    """Return the tokenizer that is stored in the corpus. A worker process loads it once.

    Raises CorpusError: it is not the tokenizer with which the build began.
    """
    tokenizer = load_cached_tokenizer(uri)
    if tokenizer.hash != expected:
        raise CorpusError(
            f"the tokenizer at {uri} has hash {tokenizer.hash[:12]}, but the build began with {expected[:12]}",
            remedy="delete the half-built corpus and build it again",
        )
    return tokenizer


@lru_cache(maxsize=1)
def _load_unit_finder(layout: BuildLayout, words: Segmentation) -> UnitFinder:
    """Return the finder of units, such as words. A worker process loads its dictionaries once."""
    store = layout.open_output()
    names = words.model_dump(include={"dictionary", "user_words", "lexicon"}, exclude_none=True)
    return UnitFinder(words, {name: store.get(layout.words_key(name)) for name in names})
