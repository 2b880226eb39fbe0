"""Second pass over a split: drop later copies, encode, and write its training and its held-out shard."""

import errno
import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from data_service.errors import CorpusError, InputError
from data_service.ingest.blocks import encode_documents
from data_service.ingest.compare import ORDINAL, Slice
from data_service.ingest.documents import read_documents
from data_service.ingest.hashing import hash_text, is_blank, is_heldout
from data_service.ingest.layout import TOKENIZER, Layout, shard_key, shard_name
from data_service.ingest.options import BuildOptions
from data_service.ingest.part import Part, PartSummary
from data_service.ingest.receipts import Receipt, write_receipt
from data_service.ingest.runs import BATCH
from data_service.ingest.splits import Split
from data_service.store.base import Store
from data_service.store.errors import OutOfSpace
from data_service.tokenizers.load import load_tokenizer
from data_service.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class WriteTask:
    """Split `index` of the input.

    `drops` say which documents are later copies; `digest` is the hash of all hashes of the first pass.
    """

    layout: Layout
    index: int
    split: Split
    options: BuildOptions
    tokenizer_hash: str
    drops: tuple[Slice, ...]
    digest: str

    @property
    def receipt(self) -> str:
        return self.layout.receipt("write", self.index)

    @property
    def input_bytes(self) -> int:
        return self.split.size


class Written(Receipt):
    """The shards of a split; `without_tokens` counts documents whose text has none for the tokenizer."""

    train: PartSummary
    heldout: PartSummary
    duplicates: int
    without_tokens: int


def write(task: WriteTask) -> Written:
    """Write a split's shards. Memory: a block or two, whatever the size of the split.

    Raises:
        InputError: the text changed since the first pass; else as `read_documents`.
        StoreError: a shard that cannot be stored; OutOfSpace also for the local temporary folder.
    """
    store = task.layout.open()
    tokenizer = _tokenizer(store.at(TOKENIZER).uri, task.tokenizer_hash)
    with tempfile.TemporaryDirectory(prefix="maskfleet-") as folder, _room_in(folder):
        name, block_tokens = shard_name(task.index), task.options.block_tokens
        with (
            Part(Path(folder, "train.tar"), name, tokenizer.vocab_size, block_tokens) as train,
            Part(Path(folder, "heldout.tar"), name, tokenizer.vocab_size, block_tokens) as heldout,
        ):
            drops = _read_drops(store, task.drops)
            without_tokens = _fill(task, tokenizer, drops, (train, heldout))
            summaries = (train.finish(), heldout.finish())
            files = _store_parts(store, task, (train, heldout), summaries)
    written = Written(
        files=files,
        train=summaries[0],
        heldout=summaries[1],
        duplicates=len(drops),
        without_tokens=without_tokens,
    )
    write_receipt(store, task.receipt, written)
    return written


def _fill(task: WriteTask, tokenizer: Tokenizer, drops: set[int], parts: tuple[Part, Part]) -> int:
    """Put every kept document into its part; the number of documents without a token."""
    without_tokens = 0
    for batch in _batches(_kept(task, drops)):
        encoded = encode_documents(tokenizer, [text for text, _ in batch])
        for (text, heldout), document in zip(batch, encoded, strict=True):
            if len(document.tokens):
                parts[heldout].add(document, len(text.encode()))
            else:
                without_tokens += 1
    return without_tokens


def _kept(task: WriteTask, drops: set[int]) -> Iterator[tuple[str, bool]]:
    """(text, held out?) of every document that is not a later copy."""
    seen = hashlib.sha256()
    ordinal = 0
    for document in read_documents(task.split, task.options):
        if is_blank(document.text):
            continue
        digest = hash_text(document.text)
        seen.update(digest)
        if ordinal not in drops:
            yield document.text, is_heldout(digest, task.options.heldout_fraction)
        ordinal += 1
    if seen.hexdigest() != task.digest:
        raise InputError(
            f"{task.split.pieces[0].file.uri} (or one of the {len(task.split.pieces)} inputs read with it) "
            "changed while the corpus was built",
            remedy="delete the half-built corpus and build it again from inputs that stay as they are",
        )


def _batches(documents: Iterator[tuple[str, bool]]) -> Iterator[list[tuple[str, bool]]]:
    batch: list[tuple[str, bool]] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document[0])
        if characters >= BATCH:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _read_drops(store: Store, slices: tuple[Slice, ...]) -> set[int]:
    """Numbers of the documents to leave out."""
    ordinals = (np.frombuffer(store.get_range(s.key, s.start, s.length), dtype=ORDINAL) for s in slices)
    return {ordinal for part in ordinals for ordinal in part.tolist()}


def _store_parts(
    store: Store, task: WriteTask, parts: tuple[Part, Part], summaries: tuple[PartSummary, PartSummary]
) -> dict[str, int]:
    """Upload what the parts wrote; key and size of everything stored."""
    files: dict[str, int] = {}
    for name, part, summary in zip(("train", "heldout"), parts, summaries, strict=True):
        if summary.shard is not None:
            key = shard_key(name, task.index)
            store.put_file(key, part.path)
            files[key] = summary.shard.size
    key, unigram = task.layout.unigram(task.index), parts[0].unigram.tobytes()
    store.put(key, unigram)
    return files | {key: len(unigram)}


@contextmanager
def _room_in(folder: str) -> Iterator[None]:
    """Says where the disk was full: shards are written to a local file before they are stored."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise
        raise OutOfSpace.at(folder, f"{error.strerror} (TMPDIR names the folder to use)") from error


@lru_cache(maxsize=1)
def _tokenizer(uri: str, expected: str) -> Tokenizer:
    """The corpus's own copy; a worker process loads it once."""
    tokenizer = load_tokenizer(uri)
    if tokenizer.hash != expected:
        raise CorpusError(
            f"{uri} is another tokenizer ({tokenizer.hash[:12]}) than the build began with ({expected[:12]})",
            remedy="delete the half-built corpus and build it again",
        )
    return tokenizer
