"""From text to blocks: documents are cut into sentences, encoded in batches, and laid into blocks whole."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_service.ingest.sentences import split_sentences
from data_service.samples.ragged import Tokens
from data_service.shards.block import Block
from data_service.tokenizers.tokenizer import Tokenizer

BATCH = 256 * 1024  # characters encoded at once: enough for speed, little beside a block


@dataclass(frozen=True)
class Encoded:
    """One document: tokens [T] uint16 or uint32, and its S sentence lengths [S] int64, none of them zero."""

    tokens: Tokens
    lengths: NDArray[np.int64]


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> list[Encoded]:
    """The documents, in order. A sentence without tokens vanishes; a document may come out with none."""
    sentences = [split_sentences(text) for text in texts]
    flat = [sentence for document in sentences for sentence in document]
    ids = [tokens for batch in _batches(flat) for tokens in tokenizer.encode_batch(batch)]
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    encoded = []
    start = 0
    for document in sentences:
        stop = start + len(document)
        nonempty = lengths[start:stop]
        encoded.append(Encoded(_join(ids[start:stop]), nonempty[nonempty > 0]))
        start = stop
    return encoded


def _batches(sentences: list[str]) -> Iterator[list[str]]:
    """Runs of sentences of about `BATCH` characters: the tokenizer needs a hundred bytes a token while it works."""
    start = characters = 0
    for index, sentence in enumerate(sentences):
        characters += len(sentence)
        if characters >= BATCH:
            yield sentences[start : index + 1]
            start, characters = index + 1, 0
    if start < len(sentences):
        yield sentences[start:]


class BlockBuilder:
    """Collects whole documents until they are a block."""

    def __init__(self) -> None:
        self._documents: list[Encoded] = []
        self.tokens = 0

    def add(self, document: Encoded) -> None:
        """Append a document of at least one token."""
        self._documents.append(document)
        self.tokens += len(document.tokens)

    def take(self) -> Block:
        """The block of what was added, at least one document; the builder is empty afterwards."""
        documents, self._documents, self.tokens = self._documents, [], 0
        return Block(
            tokens=_join([document.tokens for document in documents]),
            sentences=_boundaries(np.concatenate([document.lengths for document in documents])),
            documents=_boundaries(np.array([len(document.lengths) for document in documents])),
        )


def _join(parts: list[Tokens]) -> Tokens:
    return np.concatenate(parts)  # type: ignore[return-value]


def _boundaries(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
