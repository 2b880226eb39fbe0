"""Learns a table of similar words from corpora: word2vec (gensim) over their words, and the nearest word of the same
length for each.

The words are those that the corpora store; if they store none, those of the tokenizer. The same corpora and settings
give the same table on the same kind of machine, because one thread with one seed computes it. On other machines sums
may round differently; so a training run's identity contains a hash of the table itself.
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
from data_service.corpus.removals import load_removals, replace_removed_text
from data_service.errors import CorpusError, InputError
from data_service.samples.similar_words import MAX_WORD_TOKENS, SimilarPair, dump_similar_words
from data_service.store.open import open_store_of_file
from data_service.tokenizers.tokenizer import Tokenizer
from data_service.types import Block

_CHUNK_SIMILARITIES = 1 << 22  # similarities computed at a time
ReportBlocks = Callable[[int, int], None]  # called with the blocks read so far, and in all


class SimilarWordOptions(BaseModel):
    """Settings with which the table is learnt.

    Attributes:
        size: dimension of a word's vector.
        window: number of words on each side that are a word's context.
        epochs: number of passes over the text.
        least: smallest number of occurrences of a word; rarer words are left out.
        neighbours: number of nearest words among which a similar word must be.
        most_tokens: number of tokens to read from the beginning of each corpus.
        seed: seed of the vectors.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    size: PositiveInt = 100
    window: PositiveInt = 5
    epochs: PositiveInt = 5
    least: PositiveInt = 5
    neighbours: PositiveInt = 10
    most_tokens: PositiveInt = 200_000_000
    seed: NonNegativeInt = 1


class TableCounts(NamedTuple):
    """The numbers of words in a table (`words`) and of those with a similar word (`with_similar`)."""

    words: int
    with_similar: int


def write_similar_words(
    uris: list[str], output: str, options: SimilarWordOptions, report: ReportBlocks = lambda done, total: None
) -> TableCounts:
    """Learn a table from corpora and write it to a path or URI.

    `report`: function that is called with the number of blocks read so far and in all, over all passes.

    Raises:
        CorpusError: `output` exists already. Otherwise as in `learn_similar_words`.
    """
    store, name = open_store_of_file(output)
    if store.size(name) is not None:
        raise CorpusError(f"{output} exists already", remedy="give the path of a new file, or delete this one")
    pairs, tokenizer = learn_similar_words(uris, options, report)
    made = {**options.model_dump(), "corpora": [open_corpus(uri).manifest.fingerprint for uri in uris]}
    store.put(
        name,
        dump_similar_words(pairs, tokenizer=tokenizer.hash, vocab_size=tokenizer.vocab_size, build_settings=made),
    )
    return TableCounts(len(pairs), sum(bool(pair.similar) for pair in pairs))


def learn_similar_words(
    uris: list[str], options: SimilarWordOptions, report: ReportBlocks = lambda done, total: None
) -> tuple[list[SimilarPair], Tokenizer]:
    """Return all frequent words, each with its similar word if it has one, and the tokenizer of their ids.

    Raises:
        CorpusError: the corpora have different tokenizers, or no frequent word.
        CorruptBlock, StoreError: a block cannot be read.
        InputError: gensim is not installed.
    """
    corpora = [open_corpus(uri) for uri in uris]
    tokenizer = corpora[0].tokenizer()
    for corpus in corpora:
        corpus.require_tokenizer(tokenizer)
    text = _Sentences(corpora, tokenizer, options.most_tokens, 1 + options.epochs, report)
    model = _import_word2vec()(
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
            f"no word of {', '.join(uris)} occurs {options.least} times or more",
            remedy="give more text, or a smaller --least",
        )
    model.train(text, total_examples=model.corpus_count, epochs=model.epochs)
    return _nearest_words(model.wv, tokenizer, options.neighbours), tokenizer


def _import_word2vec() -> Any:
    try:
        return import_module("gensim.models.word2vec").Word2Vec
    except ModuleNotFoundError as error:
        raise InputError(
            "learning similar words needs the package gensim, which is not installed",
            remedy="pip install 'maskfleet[chinese]'",
        ) from error


class _Sentences:
    """An iterable over the sentences of corpora, as lists of words. A word is a string of token ids joined by spaces.

    Words of more than `MAX_WORD_TOKENS` tokens, or with special tokens, and removed documents are left out.
    """

    def __init__(
        self, corpora: list[Corpus], tokenizer: Tokenizer, most_tokens: int, passes: int, report: ReportBlocks
    ) -> None:
        self._corpora, self._tokenizer, self._most, self._report = corpora, tokenizer, most_tokens, report
        self._blocks = passes * sum(len(corpus.table("train")) for corpus in corpora)
        self._read = 0

    def __iter__(self) -> Iterator[list[str]]:
        for corpus in self._corpora:
            table, left = corpus.table("train"), self._most
            removed = load_removals(corpus.store, corpus.manifest).removed_documents("train")
            for index in range(len(table)):
                if left <= 0:
                    break
                block = read_block(corpus.store, table, index)
                block = replace_removed_text(block, removed.token_ranges(index), self._tokenizer.special.pad)
                left -= len(block.tokens)
                self._read += 1
                self._report(self._read, self._blocks)
                yield from self._block_sentences(block)

    def _block_sentences(self, block: Block) -> Iterator[list[str]]:
        """Yield the sentences of a block, each as a list of words."""
        stored = block.unit_starts("word")
        begins = self._tokenizer.word_starts[block.tokens] if stored is None else stored.copy()
        begins[block.sentences[:-1]] = True
        ids, special = block.tokens.tolist(), self._tokenizer.special_mask[block.tokens]
        starts = np.append(np.flatnonzero(begins), len(ids))
        spoilt = np.add.reduceat(special, starts[:-1]) > 0
        words = [
            "" if bad or stop - start > MAX_WORD_TOKENS else " ".join(map(str, ids[start:stop]))
            for bad, (start, stop) in zip(spoilt.tolist(), pairwise(starts.tolist()), strict=True)
        ]
        for first, last in pairwise(np.searchsorted(starts, block.sentences).tolist()):
            yield [word for word in words[first:last] if word]


def _nearest_words(vectors: Any, tokenizer: Tokenizer, neighbours: int) -> list[SimilarPair]:
    """Return each word with its similar word, if it has one.

    The similar word is the nearest of the `neighbours` nearest words that has as many characters and tokens.
    """
    words = [tuple(map(int, word.split())) for word in vectors.index_to_key]
    texts = ["".join(tokenizer.decode(word).split()) for word in words]
    kinds = [(len(text), len(word)) for text, word in zip(texts, words, strict=True)]
    number = {kind: index for index, kind in enumerate(Counter(kinds))}
    kind = np.array([number[one] for one in kinds])
    unit: NDArray[np.float32] = vectors.get_normed_vectors()
    found: list[SimilarPair] = []
    step = max(1, _CHUNK_SIMILARITIES // len(words))
    for start in range(0, len(words), step):
        nearness = unit[start : start + step] @ unit.T
        # No word is similar to itself.
        nearness[np.arange(len(nearness)), np.arange(start, start + len(nearness))] = -np.inf
        nearest = np.argsort(-nearness, axis=1, kind="stable")[:, : min(neighbours, len(words) - 1)]
        alike = kind[nearest] == kind[start : start + step, None]
        for row, (fits, order) in enumerate(zip(alike, nearest, strict=True), start=start):
            other = int(order[fits.argmax()]) if fits.any() else None
            similar = ((), "") if other is None else (words[other], texts[other])
            found.append(SimilarPair(words[row], similar[0], texts[row], similar[1]))
    return found
