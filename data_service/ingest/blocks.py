"""From text to blocks: documents are cut into sentences, encoded in batches, and laid into blocks whole."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.block import Block
from data_service.ingest.runs import encode_sentences
from data_service.ingest.sentences import split_sentences
from data_service.samples.samples import Tokens
from data_service.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class Encoded:
    """One document: tokens [T] uint16 or uint32, and its S sentence lengths [S] int64, none of them zero."""

    tokens: Tokens
    lengths: NDArray[np.int64]


def encode_documents(tokenizer: Tokenizer, texts: list[str]) -> list[Encoded]:
    """The documents, in order. A sentence without tokens vanishes; a document may come out with none."""
    sentences = [split_sentences(text) for text in texts]
    ids = encode_sentences(tokenizer, sentences)
    lengths = np.fromiter(map(len, ids), dtype=np.int64, count=len(ids))
    encoded = []
    start = 0
    for document in sentences:
        stop = start + len(document)
        nonempty = lengths[start:stop]
        encoded.append(Encoded(_join(ids[start:stop]), nonempty[nonempty > 0]))
        start = stop
    return encoded


def encode_examples(tokenizer: Tokenizer, examples: list[tuple[str, ...]]) -> list[Encoded]:
    """Examples, in order, each text of which is one sentence. Without tokens where one of its texts has none."""
    encoded = iter(encode_documents(tokenizer, [text for texts in examples for text in texts]))
    found = []
    for texts in examples:
        parts = [next(encoded).tokens for _ in texts]
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        tokens = _join(parts)
        found.append(Encoded(tokens, lengths) if lengths.all() else Encoded(tokens[:0], lengths[:0]))
    return found


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
