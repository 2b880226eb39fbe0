"""Splits texts into words where datatrove's tokenizers do, with what filters ask of each word in arrays.

spaCy's rules look at a chunk alone: a run of characters without white space. Only its special cases (`:)`, `a.m.`) are
also looked for where their parts stand in neighbouring chunks with a space between them. So each different chunk goes
through spaCy once, together with its neighbours where a special case may span them. Other tokenizers get whole texts.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain, compress, pairwise, repeat
from typing import Any

import numpy as np
from numpy.typing import NDArray

FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / phi: odd, its bits evenly mixed
_MIX = np.uint64(0xD6E8FEB86659FD93)  # of rrmxmx, as in `shingles.py`
_CACHE_CHARACTERS = 8 << 20  # characters of chunks that are kept, each chunk counted as `_CHUNK_CHARACTERS` more
_CHUNK_CHARACTERS = 32
_BATCH = 4096  # chunks that spaCy gets at a time
_TRIAL = "It's 5a.m. (e.g. in Co. A: ( o : ) ) : - ( end). don't can't... http://a.b/c?d=e; x-y/z 'S ’s «q» 3,000.5km\n\t\xa0IS_X"

# hash: sum of characters' hashes, each times FACTOR to the power of its place; power: FACTOR to the power of the length.
WORD = np.dtype(
    [
        ("hash", "<u8"),
        ("power", "<u8"),
        ("length", "<i8"),
        ("letters", "?"),  # has a letter
        ("symbols", "?"),  # is punctuation by datatrove's list
        ("ends", "?"),  # ends a sentence
        ("mark", "?"),  # is punctuation by Unicode
    ],
    align=True,
)
_CHUNK = np.dtype([("start", "<i8"), ("count", "<i8"), ("before", "?"), ("behind", "?")])


class Words:
    """The words of a text. `rows`: [W] WORD."""

    def __init__(self, rows: NDArray[np.void], texts: list[str], places: NDArray[np.int64]) -> None:
        self.rows, self._texts, self._places = rows, texts, places

    def texts(self) -> list[str]:
        """Return the words themselves."""
        return [self._texts[place] for place in self._places.tolist()]

    def least_sentences(self) -> int:
        """Return a number that is not above spaCy's number of sentences, which also counts white space as a word."""
        others = np.cumsum(self.rows["ends"])[~(self.rows["ends"] | self.rows["mark"])]
        return 1 + int(np.count_nonzero(np.diff(others, prepend=0)))


class Splitter:
    """Splits texts into words by the rules of a language, as datatrove names it."""

    def __init__(self, language: str) -> None:
        self._language, self._spacy = language, _SpaCy.of(language)
        self._forget()
        if self._spacy and self.split(_TRIAL).texts() != self._slow(_TRIAL):
            self._spacy = None
            self._forget()

    def split(self, text: str) -> Words:
        """Return the words of a text. They are valid until another text is split."""
        if text != self._text:
            self._words, self._text = self._split(text), text
        return self._words

    def _split(self, text: str) -> Words:
        chunks = text.split() if self._spacy else self._slow(text)
        rows = self._rows(chunks)
        if self._spacy and len(joined := self._joined(text, chunks, rows)) < len(chunks):
            rows = self._rows(joined)
        counts = rows["count"]
        ends = np.cumsum(counts)
        places = np.repeat(rows["start"] - ends + counts, counts) + np.arange(ends[-1] if len(ends) else 0)
        return Words(self._table[places], self._texts, places)

    def _slow(self, text: str) -> list[str]:
        from datatrove.utils.text import split_into_words

        found: list[str] = split_into_words(text, self._language)
        return found

    def _forget(self) -> None:
        self._known: dict[str, int] = {}
        self._texts: list[str] = []
        self._characters = 0
        self._chunks, self._table = np.empty(1 << 12, dtype=_CHUNK), np.empty(1 << 12, dtype=WORD)
        self._text: str | None = None

    def _rows(self, chunks: Sequence[str]) -> NDArray[np.void]:
        """Return [chunks] _CHUNK."""
        numbers = self._numbers(chunks)
        if (missing := numbers < 0).any():
            fresh = list(dict.fromkeys(compress(chunks, missing.tolist())))
            size = sum(map(len, fresh)) + _CHUNK_CHARACTERS * len(fresh)
            if self._characters and self._characters + size > _CACHE_CHARACTERS:
                self._forget()
                return self._rows(chunks)
            self._characters += size
            for start in range(0, len(fresh), _BATCH):
                self._learn(fresh[start : start + _BATCH])
            numbers = self._numbers(chunks)
        return self._chunks[numbers]

    def _numbers(self, chunks: Sequence[str]) -> NDArray[np.int64]:
        return np.fromiter(map(self._known.get, chunks, repeat(-1)), dtype=np.int64, count=len(chunks))

    def _learn(self, chunks: list[str]) -> None:
        """Add chunks, and the words of each, to the tables."""
        found = self._spacy.words(chunks) if self._spacy else [[(chunk, False)] for chunk in chunks]
        first, row = len(self._known), len(self._texts)
        words = list(chain.from_iterable(found))
        self._chunks = _grown(self._chunks, first + len(chunks))
        self._table = _grown(self._table, row + len(words))
        new = self._chunks[first : first + len(chunks)]
        new["count"] = counts = [len(part) for part in found]
        new["start"] = row + np.cumsum(counts) - counts
        if self._spacy:
            new["before"] = [bool(part) and part[-1][0] in self._spacy.befores for part in found]
            new["behind"] = [bool(part) and part[0][0] in self._spacy.behinds for part in found]
        self._table[row : row + len(words)] = _described(words, self._spacy.ends if self._spacy else frozenset())
        self._texts.extend(text for text, _ in words)
        self._known.update(zip(chunks, range(first, first + len(chunks)), strict=True))

    def _joined(self, text: str, chunks: list[str], rows: NDArray[np.void]) -> list[str]:
        """Return the chunks, with neighbours as one, a space between them, if a special case may span them."""
        assert self._spacy is not None
        near = np.flatnonzero(rows["before"][:-1] & rows["behind"][1:])
        linked = {
            place + 1
            for place, last, first in zip(
                near.tolist(),
                (rows["start"] + rows["count"] - 1)[near].tolist(),
                rows["start"][near + 1].tolist(),
                strict=True,
            )
            if self._spacy.may_span(chunks[place], self._texts[last], self._texts[first], chunks[place + 1])
        }
        if not linked:
            return chunks
        gaps = re.split(r"\S+", text)
        starts = [place for place in range(len(chunks)) if place not in linked or gaps[place] != " "]
        return [" ".join(chunks[one:other]) for one, other in pairwise([*starts, len(chunks)])]


class _SpaCy:
    """spaCy's tokenizer of a language, and which words may be parts of a special case that spans two chunks.

    Before it looks for special cases, spaCy has other words: a special case that it then found within a chunk stands
    there as the words of its rule. So the last word of a chunk tells the one that it had before, unless it is the last
    of a rule, and the first alike.

    Attributes:
        ends: words that end a sentence.
        befores, behinds: words that may stand at the end of a chunk before, or at the beginning of one behind, the
            space that a special case spans.
    """

    def __init__(self, language: Any) -> None:
        from spacy.attrs import IS_PUNCT
        from spacy.tokenizer import Tokenizer
        from spacy.vocab import Vocab

        theirs = language.tokenizer
        affixes = {
            name: getattr(theirs, name)
            for name in ("prefix_search", "suffix_search", "infix_finditer", "token_match", "url_match")
        }
        self._tokenizer = Tokenizer(Vocab(), rules=theirs.rules, **affixes)  # computes no shapes and norms of words
        self._tokenizer.vocab["IS_ALPHA"]  # the one word that a zone below would free and still find in later texts
        self._is_punctuation = language.vocab.lex_attr_getters[IS_PUNCT]
        self.ends = frozenset(language.get_pipe("sentencizer").punct_chars)
        finds = (theirs.find_prefix, theirs.find_suffix, theirs.find_infix)
        without_rules = Tokenizer(self._tokenizer.vocab, rules={}, **affixes)
        self._pairs: dict[str, set[str]] = {}
        self._firsts, self._lasts = set[str](), set[str]()
        with self._tokenizer.vocab.memory_zone():
            for rule in theirs.rules:
                if not (" " in rule or any(find(rule) for find in finds)):
                    continue  # spaCy looks for it in chunks only, by heuristics that are never off
                found, parts = ([word.text for word in split(rule)] for split in (self._tokenizer, without_rules))
                self._firsts.update(found[:1] if found[:1] != parts[:1] else ())
                self._lasts.update(found[-1:] if found[-1:] != parts[-1:] else ())
                for one, other in pairwise(parts):
                    self._pairs.setdefault(other, set()).add(one)
        self.befores = self._lasts.union(*self._pairs.values())
        self.behinds = self._firsts.union(self._pairs)

    @staticmethod
    def of(language: str) -> "_SpaCy | None":
        """Return the tokenizer if spaCy splits the language, by rules that look at a chunk alone."""
        from datatrove.utils.word_tokenizers import SpaCyTokenizer, load_word_tokenizer

        found = load_word_tokenizer(language)
        if type(found) is not SpaCyTokenizer:
            return None
        from spacy.tokenizer import Tokenizer

        return _SpaCy(found.tokenizer) if type(found.tokenizer.tokenizer) is Tokenizer else None

    def may_span(self, left: str, last: str, first: str, right: str) -> bool:
        """Return whether a special case may span two chunks, with a last and a first word."""
        behind = [first] if first not in self._firsts else [each for each in self._pairs if right.startswith(each)]
        return any(
            last in before or (last in self._lasts and left.endswith(tuple(before)))
            for before in (self._pairs.get(each, set()) for each in behind)
        )

    def words(self, chunks: list[str]) -> list[list[tuple[str, bool]]]:
        """Return the words of each chunk, and whether Unicode calls each punctuation."""
        found: list[list[tuple[str, bool]]] = [[]]
        with self._tokenizer.vocab.memory_zone():
            for token in self._tokenizer("\n".join(chunks)):
                if (text := token.text) == "\n":
                    found.append([])
                elif text := text.strip():
                    found[-1].append((text, self._is_punctuation(text)))
        return found


def _described(words: list[tuple[str, bool]], ends: frozenset[str]) -> NDArray[np.void]:
    """Return [words] WORD."""
    from datatrove.utils.text import PUNCTUATION_SET

    rows = np.empty(len(words), dtype=WORD)
    if not words:
        return rows
    texts = [text for text, _ in words]
    rows["length"] = lengths = np.array([len(text) for text in texts])
    starts = np.cumsum(lengths) - lengths
    codes = np.frombuffer("".join(texts).encode("utf-32-le", "surrogatepass"), dtype=np.uint32)
    powers = FACTOR ** np.arange(lengths.max() + 1, dtype=np.uint64)
    places = np.arange(len(codes)) - np.repeat(starts, lengths)
    rows["hash"] = np.add.reduceat(hash_of_code(codes) * powers[places], starts)
    rows["power"] = powers[lengths]
    rows["letters"] = [any(map(str.isalpha, text)) for text in texts]
    rows["symbols"] = [PUNCTUATION_SET.issuperset(text) for text in texts]
    rows["ends"] = [text in ends for text in texts]
    rows["mark"] = [mark for _, mark in words]
    return rows


def hash_of_code(codes: NDArray[Any]) -> NDArray[np.uint64]:
    """Return the hash of each character."""
    mixed = (codes.astype(np.uint64) + np.uint64(1)) * _MIX
    mixed ^= mixed >> np.uint64(32)
    return mixed * _MIX


def _grown(table: NDArray[np.void], size: int) -> NDArray[np.void]:
    """Return the table, or twice as long a copy of it if it has fewer than `size` rows."""
    if size <= len(table):
        return table
    grown = np.empty(max(size, 2 * len(table)), dtype=table.dtype)
    grown[: len(table)] = table
    return grown


@lru_cache(maxsize=4)
def splitter_of(language: str) -> Splitter:
    """Return the splitter of a language, which is one for all stages of a process."""
    return Splitter(language)
