"""From text to blocks: documents are cut into sentences, encoded in batches, and laid into blocks whole.

Sentences are encoded so that their tokens, laid end to end, are those of the whole document. What a tokenizer makes of
a sentence may depend on the text before it:

- Behind a space it does not, because words begin at spaces and a sentence keeps the space before it. Such sentences are
  encoded alone.
- Without a space, as in Chinese, it does: SentencePiece would put a space mark before the second sentence that the
  document does not have, and byte-level BPE may have a piece across the boundary. Such sentences are encoded together,
  as a run, and the tokens are cut where the sentences' text begins. A piece across a boundary belongs to the first.
- WordPiece splits at every mark, so it has no runs. GPT-2's byte-level BPE splits between a mark and a letter, so it
  has few.

A run is at most `LONGEST` characters long, since tokenizers need memory for it at once. The next run is encoded with
the end of the one before it in front, whose tokens are then dropped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar
from unicodedata import category

import numpy as np
from numpy.typing import NDArray

from data_service.ingest.sentences import LONGEST, split_sentences
from data_service.tokenizers.tokenizer import Tokenizer
from data_service.types import Block, Tokens

BATCH = 256 * 1024  # characters encoded at once: enough for speed, little beside a block
_CONTEXT = 32  # characters of the run before: a few words

T = TypeVar("T")


class _Run(NamedTuple):
    """Sentences from number `start` on, and the end of the text before them, where they continue another run."""

    start: int
    sentences: list[str]
    context: str

    @property
    def text(self) -> str:
        return self.context + "".join(self.sentences)

    @property
    def edges(self) -> list[int]:
        """Where the first sentence begins; behind a context, its second character; where each of the others begins."""
        begin, *others = accumulate(map(len, self.sentences[:-1]), initial=len(self.context))
        return [begin, begin and begin + 1, *others]


def encode_sentences(tokenizer: Tokenizer, documents: Sequence[Sequence[str]]) -> list[Tokens]:
    """The ids of every sentence, in order, of documents as `split_sentences` gives them. Some may have none."""
    sentences = [sentence for document in documents for sentence in document]
    runs = list(_runs(sentences, _continuing(tokenizer, documents)))
    together = {run.start + i for run in runs for i in range(len(run.sentences))}
    alone = [sentence for i, sentence in enumerate(sentences) if i not in together] if runs else sentences
    ids = [tokens for batch in _batches(alone, alone) for tokens in tokenizer.encode_batch(batch)]
    if not runs:
        return ids
    parts = _encode_runs(tokenizer, runs)
    rest = iter(ids)
    return [next(parts if i in together else rest) for i in range(len(sentences))]


def _continuing(tokenizer: Tokenizer, documents: Sequence[Sequence[str]]) -> list[int]:
    """Numbers of the sentences whose tokens depend on the sentence before."""
    if tokenizer.kind == "wordpiece":
        return []
    at_spaces, after_marks = tokenizer.words_begin_at_spaces, tokenizer.words_begin_after_marks
    firsts = accumulate(map(len, documents), initial=0)
    return [
        first + i
        for first, document in zip(firsts, documents, strict=False)
        for i, (before, sentence) in enumerate(pairwise(document), start=1)
        if not (at_spaces and sentence[0] == " ") and not (after_marks and _is_after_mark(before, sentence))
    ]


def _is_after_mark(before: str, sentence: str) -> bool:
    """Whether a letter or digit follows a mark: not the quote with which a word of GPT-2's rule begins ('s)."""
    mark = before[-1]
    return mark != "'" and category(mark)[0] in "PS" and category(sentence[0])[0] in "LN"


def _runs(sentences: list[str], continuing: list[int]) -> Iterator[_Run]:
    """The sentences of `continuing` with those they continue, in runs that are not too long."""
    start = stop = length = 0
    context = ""
    for index in continuing:
        follows = index == stop
        if not follows or length + len(sentences[index]) > LONGEST:
            if stop:
                yield _Run(start, sentences[start:stop], context)
            start = index if follows else index - 1
            context = sentences[index - 1][-_CONTEXT:] if follows else ""
            length = sum(map(len, sentences[start:index]))
        stop = index + 1
        length += len(sentences[index])
    if stop:
        yield _Run(start, sentences[start:stop], context)


def _encode_runs(tokenizer: Tokenizer, runs: list[_Run]) -> Iterator[Tokens]:
    """The ids of each sentence of the runs."""
    for batch in _batches(runs, [run.text for run in runs]):
        encoded = tokenizer.encode_with_edges([run.text for run in batch], [run.edges for run in batch])
        for run, (tokens, (first, behind, *places)) in zip(batch, encoded, strict=True):
            if run.context and first == behind:
                # A piece lies across the beginning: without the context, so that its text is not lost.
                yield from _encode_runs(tokenizer, [run._replace(context="")])
            else:
                yield from (tokens[i:j] for i, j in pairwise([first, *places, len(tokens)]))


def _batches(items: Sequence[T], texts: Sequence[str]) -> Iterator[Sequence[T]]:
    """Items whose texts are about `BATCH` characters: a tokenizer needs a hundred bytes a token while it works."""
    start = characters = 0
    for index, text in enumerate(texts):
        characters += len(text)
        if characters >= BATCH:
            yield items[start : index + 1]
            start, characters = index + 1, 0
    if start < len(items):
        yield items[start:]


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
