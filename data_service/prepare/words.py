"""Splits texts into words exactly like datatrove's tokenizers. Arrays hold the properties of words that filters need.

A chunk is a run of characters without white space. spaCy splits each chunk independently; only its special cases (`:)`,
`a.m.`) may also span neighbouring chunks with a space between them. So each distinct chunk is split by spaCy only once,
joined with its neighbour where a special case may span both. Other tokenizers get whole texts.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import compress, pairwise, repeat
from operator import not_
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_service.prepare.shingles import HASH_FACTOR, mix_bits

_CACHE_CHARACTERS = 8 << 20  # limit of the cache, in characters of all chunks with their overhead
_CHUNK_OVERHEAD_CHARACTERS = 32  # counted in addition for each cached chunk
_BATCH_CHUNKS = 4096  # chunks per call of spaCy
_TRIAL_TEXT = (  # sample: if our words of it differ from datatrove's, datatrove splits all texts
    "It's 5a.m. (e.g. in Co. A: ( o : ) = ):= - ( end). don't http://a.b/c?d=e; x-y/z 'S \u2019s 3,000km\n\t\xa0."
)

# hash: sum of the hash of character i times HASH_FACTOR**i; power: HASH_FACTOR**length; letters: has a letter; symbols:
# all characters are in datatrove's list of punctuation; ends: ends a sentence; mark: is punctuation by Unicode.
WORD_RECORD_DTYPE = np.dtype("<u8,<u8,<i8,?,?,?,?", align=True)
WORD_RECORD_DTYPE.names = ("hash", "power", "length", "letters", "symbols", "ends", "mark")


class WordTable:
    """The words of a text. `rows`: [W] records (`WORD_RECORD_DTYPE`) with the properties of each word."""

    def __init__(self, rows: NDArray[np.void], texts: list[str], places: NDArray[np.int64]) -> None:
        self.rows, self._texts, self._places = rows, texts, places

    def texts(self) -> list[str]:
        """Return the words as strings."""
        return [self._texts[place] for place in self._places.tolist()]

    def min_sentence_count(self) -> int:
        """Return a lower bound of spaCy's number of sentences. (spaCy also treats white space as words.)"""
        others = np.cumsum(self.rows["ends"])[~(self.rows["ends"] | self.rows["mark"])]
        return 1 + int(np.count_nonzero(np.diff(others, prepend=0)))


class WordSplitter:
    """Splits texts into words by the rules of a language. `language`: datatrove's code of it."""

    def __init__(self, language: str) -> None:
        self._language, self._spacy = language, _SpaCy.load(language)
        self._text: str | None = None
        self._clear_cache()
        if self._spacy and self.split(_TRIAL_TEXT).texts() != self._split_by_datatrove(_TRIAL_TEXT):
            self._spacy = None
            self._clear_cache()

    def split(self, text: str) -> WordTable:
        """Return the words of a text."""
        if text != self._text:
            chunks = self._spacy.chunks(text) if self._spacy else self._split_by_datatrove(text)
            numbers = self._cached_chunk_numbers(chunks)
            counts = self._ends[numbers] - (starts := self._ends[numbers - 1])
            before = np.cumsum(counts) - counts
            places = np.repeat(starts - before, counts) + np.arange(counts.sum())
            self._words, self._text = WordTable(self._rows[places], self._texts, places), text
        return self._words

    def _split_by_datatrove(self, text: str) -> list[str]:
        from datatrove.utils.text import split_into_words

        found: list[str] = split_into_words(text, self._language)
        return found

    def _clear_cache(self) -> None:
        self._known: dict[str, int] = {"": 0}  # chunk to its number in the cache
        self._texts: list[str] = []  # words of all cached chunks, in order
        # By the number of a chunk, the end of its words in `_texts`; and the properties of each word in `_texts`.
        self._ends, self._rows = np.zeros(1 << 12, dtype=np.int64), np.empty(1 << 12, dtype=WORD_RECORD_DTYPE)
        self._characters = 0
        self._text = None

    def _cached_chunk_numbers(self, chunks: Sequence[str]) -> NDArray[np.int64]:
        """Return [chunks] int64: the number of each chunk in the cache. Adds missing chunks to the cache."""
        numbers = np.fromiter(map(self._known.get, chunks, repeat(-1)), dtype=np.int64, count=len(chunks))
        if (missing := numbers < 0).any():
            fresh = list(dict.fromkeys(compress(chunks, missing.tolist())))
            size = sum(map(len, fresh)) + _CHUNK_OVERHEAD_CHARACTERS * len(fresh)
            if self._characters and self._characters + size > _CACHE_CHARACTERS:
                self._clear_cache()
                return self._cached_chunk_numbers(chunks)
            self._characters += size
            for start in range(0, len(fresh), _BATCH_CHUNKS):
                self._add_to_cache(fresh[start : start + _BATCH_CHUNKS])
            return self._cached_chunk_numbers(chunks)
        return numbers

    def _add_to_cache(self, chunks: list[str]) -> None:
        """Add new chunks and their words to the cache."""
        found = self._spacy.split_words(chunks) if self._spacy else [[chunk] for chunk in chunks]
        first, row = len(self._known), len(self._texts)
        words = [word for part in found for word in part]
        self._ends = _grown_table(self._ends, first + len(chunks))
        self._rows = _grown_table(self._rows, row + len(words))
        self._ends[first : first + len(chunks)] = row + np.cumsum([len(part) for part in found])
        self._rows[row : row + len(words)] = _word_records(words, self._spacy)
        self._texts.extend(words)
        self._known.update(zip(chunks, range(first, first + len(chunks)), strict=True))


class _SpaCy:
    """spaCy's tokenizer of a language.

    Attributes:
        ends: words that end a sentence.
        is_mark: function that returns whether a word is punctuation by Unicode.
    """

    def __init__(self, language: Any) -> None:
        from spacy.attrs import IS_PUNCT
        from spacy.tokenizer import Tokenizer
        from spacy.vocab import Vocab

        theirs = language.tokenizer
        names = ("prefix_search", "suffix_search", "infix_finditer", "token_match", "url_match")
        affixes = {name: getattr(theirs, name) for name in names}
        self.ends = frozenset(language.get_pipe("sentencizer").punct_chars)
        self._rules = frozenset(theirs.rules)
        self.is_mark = language.vocab.lex_attr_getters[IS_PUNCT]
        # A new vocabulary saves time, because it does not compute shapes and norms of words.
        self._tokenizer = Tokenizer(Vocab(), rules=theirs.rules, **affixes)
        # Create this word before the memory zone: at its end the zone frees its words, but this one stays referenced.
        self._tokenizer.vocab["IS_ALPHA"]
        without_rules = Tokenizer(self._tokenizer.vocab, rules={}, **affixes)
        # Pairs of adjacent words in special cases, by the last character of the first and the first of the second word.
        self._pairs: dict[str, list[tuple[str, str]]] = {}
        with self._tokenizer.vocab.memory_zone():
            for rule in theirs.rules:
                for one, other in pairwise(token.text for token in without_rules(rule)):
                    self._pairs.setdefault(one[-1] + other[0], []).append((one, other))

    @staticmethod
    def load(language: str) -> "_SpaCy | None":
        """Return spaCy's tokenizer if datatrove uses it for the language and it splits chunk by chunk; else None."""
        from datatrove.utils.word_tokenizers import SpaCyTokenizer, load_word_tokenizer

        found = load_word_tokenizer(language)
        if type(found) is not SpaCyTokenizer:
            return None
        from spacy.tokenizer import Tokenizer

        return _SpaCy(found.tokenizer) if type(found.tokenizer.tokenizer) is Tokenizer else None

    def chunks(self, text: str) -> list[str]:
        """Return the chunks of a text. Neighbours that a special case may span form one chunk, with their space."""
        chunks, pairs = text.split(), self._pairs
        spanned = {
            place
            for place, (left, right) in enumerate(pairwise(chunks), start=1)
            if left[-1] + right[0] in pairs
            and any(left.endswith(one) and right.startswith(other) for one, other in pairs[left[-1] + right[0]])
        }
        if not spanned:
            return chunks
        gaps = re.split(r"\S+", text)
        starts = [place for place in range(len(chunks)) if place not in spanned or gaps[place] != " "]
        return [" ".join(chunks[one:other]) for one, other in pairwise([*starts, len(chunks)])]

    def split_words(self, chunks: list[str]) -> list[list[str]]:
        """Return the words of each chunk."""
        whole = list(map(self._is_single_word, chunks))
        found: list[list[str]] = [[]]
        with self._tokenizer.vocab.memory_zone():
            for token in self._tokenizer("\n".join(compress(chunks, map(not_, whole)))):
                if (text := token.text) == "\n":
                    found.append([])
                elif text := text.strip():
                    found[-1].append(text)
        split = iter(found)
        return [[chunk] if one else next(split) for chunk, one in zip(chunks, whole, strict=True)]

    def _is_single_word(self, chunk: str) -> bool:
        """Return whether a chunk is surely one word: letters only, no special case, not cut by any rule."""
        cuts = self._tokenizer
        return (
            chunk.isalpha()
            and chunk not in self._rules
            and not (cuts.find_prefix(chunk) or cuts.find_suffix(chunk) or cuts.find_infix(chunk))
        )


def _word_records(words: list[str], spacy: _SpaCy | None) -> NDArray[np.void]:
    """Return [words] records (`WORD_RECORD_DTYPE`) with the properties of each word."""
    from datatrove.utils.text import PUNCTUATION_SET

    rows = np.zeros(len(words), dtype=WORD_RECORD_DTYPE)
    rows["length"] = lengths = np.array([len(word) for word in words], dtype=np.int64)
    codes = np.frombuffer("".join(words).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    starts = np.cumsum(lengths) - lengths
    powers = np.uint64(HASH_FACTOR) ** np.arange(lengths.max(initial=0) + 1, dtype=np.uint64)
    hashes = mix_bits(codes.astype(np.uint64)) * powers[np.arange(len(codes)) - np.repeat(starts, lengths)]
    rows["hash"], rows["power"] = np.add.reduceat(hashes, starts) if words else 0, powers[lengths]
    rows["letters"] = [any(map(str.isalpha, word)) for word in words]
    rows["symbols"] = [PUNCTUATION_SET.issuperset(word) for word in words]
    if spacy:
        rows["ends"], rows["mark"] = [word in spacy.ends for word in words], [*map(spacy.is_mark, words)]
    return rows


def _grown_table(table: NDArray[Any], size: int) -> NDArray[Any]:
    """Return the table, or a copy with at least twice as many rows if it has fewer than `size` rows."""
    return table if size <= len(table) else np.resize(table, max(size, 2 * len(table)))


@lru_cache(maxsize=4)
def get_splitter(language: str) -> WordSplitter:
    """Return the splitter of a language, shared by all stages of a process."""
    return WordSplitter(language)
