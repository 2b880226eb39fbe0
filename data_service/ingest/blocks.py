"""Turns text into blocks of tokens, the units in which a corpus is stored and read: tokenises each document as a whole,
finds the first token of each sentence, and collects whole documents in a block.

A sentence begins with the first token that starts in the white space before it or at its first character. If a token
spans the end of one sentence and the start of the next, it belongs to the later sentence; such boundaries are counted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from data_service.corpus.words import UnitFinder, mark_unit_starts
from data_service.ingest.sentences import Language, sentence_bounds
from data_service.tokenizers.loss import LossMeter
from data_service.tokenizers.quick import TextEncoder
from data_service.tokenizers.tokenizer import PlacedTokens, Tokenizer
from data_service.tokenizers.whole_text import encode_in_windows
from data_service.types import Block, Level, Tokens

BATCH_CHARACTERS = 256 * 1024  # characters encoded per call: enough for speed, few compared with a block


@dataclass(frozen=True)
class EncodedDocument:
    """A tokenised document.

    Attributes:
        tokens: [T] uint16 or uint32, token ids.
        lengths: [S] int64, number of tokens of each sentence, at least one.
        begins: [levels, T] bool, whether a unit of that level (such as word) begins at that token; None without units.
        moved: number of sentences whose first character is inside a token; each then begins with that token.
    """

    tokens: Tokens
    lengths: NDArray[np.int64]
    begins: NDArray[np.bool_] | None = None
    moved: int = 0


def encode_documents(
    tokenizer: Tokenizer | TextEncoder,
    texts: Sequence[str],
    finder: UnitFinder | None = None,
    word_starts: Sequence[bytes] = (),
    *,
    language: Language = "any",
    meter: LossMeter | None = None,
) -> list[EncodedDocument]:
    """Return the tokenised documents, in order. Sentences without tokens are left out; a document may have no tokens.

    Args:
        tokenizer: tokenizer, or an encoder that uses it.
        texts: texts of the documents.
        finder: finds units of words, phrases and entities in the text; None for no units.
        word_starts: where the words of each document begin (`mark_word_starts`), if the input holds words.
        language: language of the texts, as in `sentence_bounds`.
        meter: counts the text that the tokenizer loses; None not to count it.
    """
    placed, cuts = encode_in_windows(tokenizer, texts, by_word=finder is None)
    if meter is not None:
        meter.cuts += cuts
        meter.measure_texts(texts, placed)
    documents = []
    for number, (text, found) in enumerate(zip(texts, placed, strict=True)):
        bounds = sentence_bounds(text, language)
        firsts, moved = _find_sentence_starts(found, bounds)
        if moved and found.by_word:  # a token's own range is needed, not its word's, to see whether it spans a boundary
            [found] = tokenizer.encode_placed([text])
            firsts, moved = _find_sentence_starts(found, bounds)
        begins = None
        if finder is not None:
            stops = [0, *bounds[:, 0].tolist(), len(text)]
            sentences = [text[start:stop] for start, stop in pairwise(stops)]
            starts = finder.find_unit_starts(sentences, word_starts[number] if word_starts else b"")
            begins = mark_unit_starts(starts, text, found.starts, firsts)
        lengths = np.diff(np.append(firsts, len(found)))
        documents.append(EncodedDocument(found.ids, lengths, begins, moved))
    return documents


def _find_sentence_starts(placed: PlacedTokens, bounds: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Return [S] int64, the index of each sentence's first token, and how many of these tokens span a boundary."""
    if not len(placed):
        return np.empty(0, dtype=np.int64), 0
    first = np.searchsorted(placed.starts, bounds[:, 0])
    across = (first > 0) & (placed.ends[first - 1] > bounds[:, 1])
    firsts = np.append(0, first - across)
    firsts = firsts[np.append(True, firsts[1:] != firsts[:-1]) & (firsts < len(placed))]
    return firsts, int(np.count_nonzero(across))


def encode_examples(
    tokenizer: Tokenizer | TextEncoder, examples: Sequence[tuple[str, ...]], meter: LossMeter | None = None
) -> list[EncodedDocument]:
    """Return the tokenised examples of a corpus of pairs, in order. Each text of an example becomes one sentence.

    If a text of an example has no tokens, the whole example has none.
    """
    texts = [text for texts in examples for text in texts]
    encoded = iter(encode_documents(tokenizer, texts, meter=meter))
    found = []
    for example in examples:
        parts = [next(encoded).tokens for _ in example]
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        tokens = _join_tokens(parts)
        found.append(EncodedDocument(tokens, lengths) if lengths.all() else EncodedDocument(tokens[:0], lengths[:0]))
    return found


class BlockBuilder:
    """Collects whole documents for a block. `levels`: levels of units (word, phrase, entity) that documents have."""

    def __init__(self, levels: tuple[Level, ...] = ()) -> None:
        self._documents: list[EncodedDocument] = []
        self._levels = levels
        self.tokens = 0

    def add(self, document: EncodedDocument) -> None:
        """Append a document of at least one token."""
        self._documents.append(document)
        self.tokens += len(document.tokens)

    def pop_block(self) -> Block:
        """Return a block of the added documents, at least one, and empty the builder."""
        documents, self._documents, self.tokens = self._documents, [], 0
        found = [document.begins for document in documents if document.begins is not None]
        begins = np.concatenate(found, axis=1) if found else ()
        return Block(
            tokens=_join_tokens([document.tokens for document in documents]),
            sentences=_cumulative_offsets(np.concatenate([document.lengths for document in documents])),
            documents=_cumulative_offsets(np.array([len(document.lengths) for document in documents])),
            units={level: np.packbits(bits) for level, bits in zip(self._levels, begins, strict=True)},
        )


def _join_tokens(parts: list[Tokens]) -> Tokens:
    return np.concatenate(parts)  # type: ignore[return-value]


def _cumulative_offsets(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
