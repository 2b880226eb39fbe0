"""Learns the table of similar words from corpora: word2vec over their words (gensim), and for each the nearest word of
the same length.

Words are those that the corpora store, or the tokenizer's where they store none. The same corpora and settings give the
same table on the same kind of machine: one thread, one seed. Sums may round otherwise elsewhere; a run's identity
names the table itself.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

from data_service.corpus.corpus import Corpus, open_corpus
from data_service.corpus.reader import read_block
from data_service.errors import CorpusError, InputError
from data_service.samples.similar_words import LONGEST, SimilarPair, dump_similar_words
from data_service.store.open import open_store
from data_service.tokenizers.tokenizer import Tokenizer
from data_service.types import Block

_AT_ONCE = 1 << 22  # similarities worked out together
ReportBlocks = Callable[[int, int], None]


class SimilarWordOptions(BaseModel):
    """How the table is learnt.

    Attributes:
        size: numbers of a word's vector.
        window: words on each side that are a word's context.
        epochs: passes over the text.
        least: words that are rarer are left out.
        neighbours: a similar word must be among this many nearest words.
        most_tokens: of each corpus so many tokens are read, from its beginning.
        seed: of the vectors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: PositiveInt = 100
    window: PositiveInt = 5
    epochs: PositiveInt = 5
    least: PositiveInt = 5
    neighbours: PositiveInt = 10
    most_tokens: PositiveInt = 200_000_000
    seed: NonNegativeInt = 1


class WrittenTable(NamedTuple):
    """How many words a table has, and how many of them have a similar one."""

    words: int
    with_similar: int


def write_similar_words(
    uris: list[str],
    out: str,
    options: SimilarWordOptions,
    report: ReportBlocks = lambda done, total: None,
) -> WrittenTable:
    """Learn the table from corpora and write it to a path or URI.

    `report` is called with blocks read, and how many are read in all, passes over the text added up.

    Raises:
        CorpusError: something is there already; else as `learn_similar_words`.
    """
    base, slash, name = out.rpartition("/")
    store = open_store(base or ("/" if slash else "."))
    if store.size(name) is not None:
        raise CorpusError(f"{out} exists already", remedy="name a new file, or delete this one")
    pairs, tokenizer = learn_similar_words(uris, options, report)
    made = {**options.model_dump(), "corpora": [open_corpus(uri).manifest.fingerprint for uri in uris]}
    store.put(
        name,
        dump_similar_words(pairs, tokenizer=tokenizer.hash, vocab_size=tokenizer.vocab_size, made=made),
    )
    return WrittenTable(len(pairs), sum(bool(pair.similar) for pair in pairs))


def learn_similar_words(
    uris: list[str], options: SimilarWordOptions, report: ReportBlocks = lambda done, total: None
) -> tuple[list[SimilarPair], Tokenizer]:
    """Return every word that is frequent enough, with its similar word if it has one; and the tokenizer of their ids.

    Raises:
        CorpusError: corpora of different tokenizers, or without frequent words. CorruptBlock, StoreError.
        InputError: gensim is not installed.
    """
    corpora = [open_corpus(uri) for uri in uris]
    tokenizer = corpora[0].tokenizer()
    for corpus in corpora:
        corpus.require_tokenizer(tokenizer)
    text = _Sentences(corpora, tokenizer, options.most_tokens, 1 + options.epochs, report)
    model = _word2vec()(
        vector_size=options.size,
        window=options.window,
        min_count=options.least,
        epochs=options.epochs,
        seed=options.seed,
        workers=1,
    )
    model.build_vocab(text)
    if not len(model.wv):
        raise CorpusError(
            f"no word of {', '.join(uris)} comes {options.least} times or more",
            remedy="give more text, or a smaller --least",
        )
    model.train(text, total_examples=model.corpus_count, epochs=model.epochs)
    return _pairs(model.wv, tokenizer, options.neighbours), tokenizer


def _word2vec() -> Any:
    try:
        return import_module("gensim.models.word2vec").Word2Vec
    except ModuleNotFoundError as error:
        raise InputError(
            "similar words are learnt with the package gensim, which is not installed",
            remedy="pip install 'maskfleet[chinese]'",
        ) from error


class _Sentences:
    """The sentences of corpora as lists of words, each spelt as its ids with spaces between. May be read many times.

    Words of more than `LONGEST` tokens, or with special tokens, are left out."""

    def __init__(
        self,
        corpora: list[Corpus],
        tokenizer: Tokenizer,
        most_tokens: int,
        passes: int,
        report: ReportBlocks,
    ) -> None:
        self._corpora, self._tokenizer, self._most, self._report = corpora, tokenizer, most_tokens, report
        self._blocks = passes * sum(len(corpus.table("train")) for corpus in corpora)
        self._read = 0

    def __iter__(self) -> Iterator[list[str]]:
        for corpus in self._corpora:
            table, left = corpus.table("train"), self._most
            for index in range(len(table)):
                if left <= 0:
                    break
                block = read_block(corpus.store, table, index)
                left -= len(block.tokens)
                self._read += 1
                self._report(self._read, self._blocks)
                yield from self._of_block(block)

    def _of_block(self, block: Block) -> Iterator[list[str]]:
        stored = block.begins("word")
        begins = self._tokenizer.word_starts[block.tokens] if stored is None else stored.copy()
        begins[block.sentences[:-1]] = True
        ids, special = block.tokens.tolist(), self._tokenizer.special_mask[block.tokens]
        starts = np.append(np.flatnonzero(begins), len(ids))
        spoilt = np.add.reduceat(special, starts[:-1]) > 0
        words = [
            "" if bad or stop - start > LONGEST else " ".join(map(str, ids[start:stop]))
            for bad, (start, stop) in zip(spoilt.tolist(), pairwise(starts.tolist()), strict=True)
        ]
        for first, last in pairwise(np.searchsorted(starts, block.sentences).tolist()):
            yield [word for word in words[first:last] if word]


def _pairs(vectors: Any, tokenizer: Tokenizer, neighbours: int) -> list[SimilarPair]:
    """Return each word and the nearest word with as many characters and tokens, among the `neighbours` nearest of
    all."""
    words = [tuple(map(int, word.split())) for word in vectors.index_to_key]
    texts = ["".join(tokenizer.decode(word).split()) for word in words]
    kinds = [(len(text), len(word)) for text, word in zip(texts, words, strict=True)]
    number = {kind: index for index, kind in enumerate(Counter(kinds))}
    kind = np.array([number[one] for one in kinds])
    unit: NDArray[np.float32] = vectors.get_normed_vectors()
    found: list[SimilarPair] = []
    step = max(1, _AT_ONCE // len(words))
    for start in range(0, len(words), step):
        nearness = unit[start : start + step] @ unit.T
        nearness[np.arange(len(nearness)), np.arange(start, start + len(nearness))] = -np.inf  # not itself
        nearest = np.argsort(-nearness, axis=1, kind="stable")[:, : min(neighbours, len(words) - 1)]
        alike = kind[nearest] == kind[start : start + step, None]
        for row, (fits, order) in enumerate(zip(alike, nearest, strict=True), start=start):
            other = int(order[fits.argmax()]) if fits.any() else None
            similar = ((), "") if other is None else (words[other], texts[other])
            found.append(SimilarPair(words[row], similar[0], texts[row], similar[1]))
    return found
