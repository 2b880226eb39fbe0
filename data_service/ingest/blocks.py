"""Turns text into blocks: documents are cut into sentences, encoded in batches, and put whole into blocks.

Sentences are encoded so that their joined tokens are those of the whole document. The tokens of a sentence may depend
on the text before it:

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

from data_service.corpus.words import UnitFinder, units_of_tokens
from data_service.ingest.sentences import LONGEST, Language, split_sentences
from data_service.tokenizers.tokenizer import Tokenizer
from data_service.types import Block, Level, Tokens

BATCH = 256 * 1024  # characters encoded at once: enough for speed, little beside a block
_CONTEXT = 32  # characters of the run before: a few words

T = TypeVar("T")


class _Run(NamedTuple):
    """Sentences that are encoded together, from number `start` on.

    `context`: the end of the text before them, if they continue another run.
    """

    start: int
    sentences: list[str]
    context: str

    @property
    def text(self) -> str:
        return self.context + "".join(self.sentences)

    @property
    def edges(self) -> list[int]:
        """Characters at which the tokens of the sentences are cut.

        They are the beginning of the first sentence; its second character (0 if there is no context); then the
        beginnings of the other sentences.
        """
        begin, *others = accumulate(map(len, self.sentences[:-1]), initial=len(self.context))
        return [begin, begin and begin + 1, *others]


class EncodedSentence(NamedTuple):
    """An encoded sentence: its ids, [n], and the character at which each token begins, [n]; None if not requested."""

    ids: Tokens
    places: NDArray[np.int64] | None = None


def encode_sentences(
    tokenizer: Tokenizer, documents: Sequence[Sequence[str]], *, placed: bool = False
) -> list[EncodedSentence]:
    """Return all sentences of documents, encoded, in order. Some may have no ids.

    `documents`: lists of sentences as `split_sentences` returns them. `placed`: whether the places of the tokens are
    returned, too, which takes longer.
    """
    sentences = [sentence for document in documents for sentence in document]
    runs = list(_runs(sentences, _continuing(tokenizer, documents)))
    together = {run.start + i for run in runs for i in range(len(run.sentences))}
    alone = [sentence for i, sentence in enumerate(sentences) if i not in together] if runs else sentences
    found = [one for batch in _batches(alone, alone) for one in _encode_alone(tokenizer, batch, placed)]
    if not runs:
        return found
    parts = _encode_runs(tokenizer, runs, placed)
    rest = iter(found)
    return [next(parts if i in together else rest) for i in range(len(sentences))]


def _continuing(tokenizer: Tokenizer, documents: Sequence[Sequence[str]]) -> list[int]:
    """Return the numbers of the sentences whose tokens depend on the previous sentence."""
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
    """Return whether `sentence` begins with a letter or digit after a punctuation mark at the end of `before`.

    The quote that begins a word by GPT-2's rule ('s) does not count as such a mark.
    """
    mark = before[-1]
    return mark != "'" and category(mark)[0] in "PS" and category(sentence[0])[0] in "LN"


def _runs(sentences: list[str], continuing: list[int]) -> Iterator[_Run]:
    """Yield runs of the sentences in `continuing` and those that they continue, each at most `LONGEST` characters."""
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


def _encode_alone(tokenizer: Tokenizer, texts: Sequence[str], placed: bool) -> list[EncodedSentence]:
    if placed:
        return [EncodedSentence(*pair) for pair in tokenizer.encode_with_places(texts)]
    return [EncodedSentence(ids) for ids in tokenizer.encode_batch(texts)]


def _encode_runs(tokenizer: Tokenizer, runs: list[_Run], placed: bool) -> Iterator[EncodedSentence]:
    """Yield each sentence of the runs, encoded."""
    for batch in _batches(runs, [run.text for run in runs]):
        for run, (whole, (first, behind, *others)) in zip(
            batch, _encode_whole(tokenizer, batch, placed), strict=True
        ):
            if run.context and first == behind:
                # A piece lies across the beginning: without the context, so that its text is not lost.
                yield from _encode_runs(tokenizer, [run._replace(context="")], placed)
                continue
            begins = [run.edges[0], *run.edges[2:]]
            for begin, (i, j) in zip(begins, pairwise([first, *others, len(whole.ids)]), strict=True):
                places = None if whole.places is None else whole.places[i:j] - begin
                yield EncodedSentence(whole.ids[i:j], places)


def _encode_whole(
    tokenizer: Tokenizer, runs: Sequence[_Run], placed: bool
) -> Iterator[tuple[EncodedSentence, list[int]]]:
    """Yield each run encoded like one sentence, and the number of its tokens that begin before each of its edges."""
    texts, edges = [run.text for run in runs], [run.edges for run in runs]
    if not placed:
        for ids, before in tokenizer.encode_with_edges(texts, edges):
            yield EncodedSentence(ids), before
        return
    for (ids, places), of_run in zip(tokenizer.encode_with_places(texts), edges, strict=True):
        yield EncodedSentence(ids, places), [edge and int(np.searchsorted(places, edge)) for edge in of_run]


def _batches(items: Sequence[T], texts: Sequence[str]) -> Iterator[Sequence[T]]:
    """Yield batches of items whose texts have about `BATCH` characters.

    Batches bound the memory: a tokenizer needs a hundred bytes for each token while it works.
    """
    start = characters = 0
    for index, text in enumerate(texts):
        characters += len(text)
        if characters >= BATCH:
            yield items[start : index + 1]
            start, characters = index + 1, 0
    if start < len(items):
        yield items[start:]


@dataclass(frozen=True)
class EncodedDocument:
    """A tokenised document.

    Attributes:
        tokens: [T] uint16 or uint32, token ids.
        lengths: [S] int64, number of tokens of each sentence, at least one.
        begins: [levels, T] bool, whether a unit of each level begins with each token; None if units are not looked for.
    """

    tokens: Tokens
    lengths: NDArray[np.int64]
    begins: NDArray[np.bool_] | None = None


def encode_documents(
    tokenizer: Tokenizer,
    texts: list[str],
    finder: UnitFinder | None = None,
    given: Sequence[bytes] = (),
    language: Language = "any",
) -> list[EncodedDocument]:
    """Return the documents, encoded, in order. Sentences without tokens are left out; a document may have no tokens.

    Args:
        tokenizer: tokenizer to encode with.
        documents: texts of the documents.
        finder: finder of units; None not to look for units.
        given: words of each document, as `spelt_words` returns them, if the input holds words.
        language: as for `split_sentences`.
    """
    sentences = [split_sentences(text, language) for text in texts]
    found = encode_sentences(tokenizer, sentences, placed=finder is not None)
    lengths = np.fromiter((len(one.ids) for one in found), dtype=np.int64, count=len(found))
    begins = None
    if finder is not None:
        begins = _units(finder, [one for document in sentences for one in document], found, b"".join(given))
    encoded = []
    start = token = 0
    for document in sentences:
        stop = start + len(document)
        of_sentences = lengths[start:stop]
        end = token + int(of_sentences.sum())
        encoded.append(
            EncodedDocument(
                _join([one.ids for one in found[start:stop]]),
                of_sentences[of_sentences > 0],
                None if begins is None else begins[:, token:end],
            )
        )
        start, token = stop, end
    return encoded


def _units(
    finder: UnitFinder, sentences: list[str], encoded: list[EncodedSentence], given: bytes
) -> NDArray[np.bool_]:
    """Return [levels, T] bool, whether each token of the sentences begins a unit."""
    offsets = accumulate(map(len, sentences), initial=0)
    placed = [
        one.places + offset for one, offset in zip(encoded, offsets, strict=False) if one.places is not None
    ]
    ends = np.cumsum([len(places) for places in placed])
    places = np.concatenate(placed)
    firsts = np.unique(np.append(0, ends[:-1]))
    starts = finder.find(sentences, given)
    return units_of_tokens(starts, "".join(sentences), places, firsts[firsts < len(places)])


def encode_examples(tokenizer: Tokenizer, examples: list[tuple[str, ...]]) -> list[EncodedDocument]:
    """Return the examples, encoded, in order. Each text becomes one sentence.

    If a text of an example has no tokens, the whole example has none.
    """
    encoded = iter(encode_documents(tokenizer, [text for texts in examples for text in texts]))
    found = []
    for texts in examples:
        parts = [next(encoded).tokens for _ in texts]
        lengths = np.array([len(part) for part in parts], dtype=np.int64)
        tokens = _join(parts)
        found.append(
            EncodedDocument(tokens, lengths) if lengths.all() else EncodedDocument(tokens[:0], lengths[:0])
        )
    return found


class BlockBuilder:
    """A builder that collects whole documents for a block. `levels`: levels of units that the documents have."""

    def __init__(self, levels: tuple[Level, ...] = ()) -> None:
        self._documents: list[EncodedDocument] = []
        self._levels = levels
        self.tokens = 0

    def add(self, document: EncodedDocument) -> None:
        """Append a document of at least one token."""
        self._documents.append(document)
        self.tokens += len(document.tokens)

    def take(self) -> Block:
        """Return a block of the added documents, at least one, and empty the builder."""
        documents, self._documents, self.tokens = self._documents, [], 0
        found = [document.begins for document in documents if document.begins is not None]
        begins = np.concatenate(found, axis=1) if found else ()
        return Block(
            tokens=_join([document.tokens for document in documents]),
            sentences=_boundaries(np.concatenate([document.lengths for document in documents])),
            documents=_boundaries(np.array([len(document.lengths) for document in documents])),
            units={level: np.packbits(bits) for level, bits in zip(self._levels, begins, strict=True)},
        )


def _join(parts: list[Tokens]) -> Tokens:
    return np.concatenate(parts)  # type: ignore[return-value]


def _boundaries(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
