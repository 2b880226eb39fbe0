"""Encodes sentences one by one so that, laid end to end, they are the tokens of the whole document.

What a tokenizer makes of a sentence depends on what stands before it. After a space it does not: words begin at
spaces, and a sentence keeps the space before it. So sentences behind a space are encoded alone. Where there is no
space between two, as in Chinese, SentencePiece would put a space mark before the second that the document does not
have, and byte-level BPE may have a piece across both. Those are encoded together, as a run, and cut where their
text begins; a piece across the boundary belongs to the first. WordPiece splits at every mark, so it has no runs.

A run is at most `LONGEST` characters long, since tokenizers need memory for it at once. The next one is encoded with
the end of the one before it in front, whose tokens are then dropped.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

from data_service.ingest.sentences import LONGEST
from data_service.samples.samples import Tokens
from data_service.tokenizers.tokenizer import Tokenizer

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
    at_spaces = tokenizer.words_begin_at_spaces
    firsts = accumulate(map(len, documents), initial=0)
    return [
        first + i
        for first, document in zip(firsts, documents, strict=False)
        for i, sentence in enumerate(document)
        if i and not (at_spaces and sentence[0] == " ")
    ]


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
        encoded = tokenizer.encode_with_offsets([run.text for run in batch])
        for run, (tokens, offsets) in zip(batch, encoded, strict=True):
            begin = bisect_left(offsets, (len(run.context),))
            if run.context and (begin == len(offsets) or offsets[begin][0] > len(run.context)):
                # A piece lies across the beginning: without the context, so that its text is not lost.
                alone = run._replace(context="")
                yield from _cut(alone, *tokenizer.encode_with_offsets([alone.text])[0])
            else:
                yield from _cut(run, tokens, offsets)


def _cut(run: _Run, tokens: Tokens, offsets: list[tuple[int, int]]) -> Iterator[Tokens]:
    edges = list(accumulate(map(len, run.sentences), initial=len(run.context)))
    places = [bisect_left(offsets, (edge,)) for edge in edges[:-1]]
    return (tokens[first:stop] for first, stop in pairwise([*places, len(tokens)]))


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
