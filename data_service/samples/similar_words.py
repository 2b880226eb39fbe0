"""MLM as correction: words are replaced by similar words of the same length (Cui et al. 2020, section 3.1).

A share of the chosen words is replaced by similar words, a share by random ones, and the rest is kept. A word without a
similar word in the table is replaced by a random one. The words of an n-gram are replaced one by one. A random word
is any word of the table with as many tokens; if there is none, random tokens are used.

The table is a text file: the first line is a JSON header; each other line has a word's token ids, the ids of the
similar word (may be empty), and both words as text, for people, separated by tabs. All ids are of one tokenizer, and
both words of a line have the same number of tokens.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from data_service.errors import CorpusError
from data_service.formats import NEWER_REMEDY, StrictRecord, newer_version_message
from data_service.rng import UINT32_RANGE, scale_draws
from data_service.samples.replacement import Replacement, Vocabulary
from data_service.store.errors import KeyMissing
from data_service.store.open import open_store_of_file
from data_service.types import Tokens

MAX_WORD_TOKENS = 8  # longest word of the table, in tokens

_FORMAT = "maskfleet-similar-words"  # value of the key `format` in the header of a table
_GOLDEN_RATIO = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / phi: an odd multiplier that mixes bits well


class SimilarSource(StrictRecord):
    """The reference in a `StreamSpec` to a table of similar words: URI (no part of the stream's identity) and sha256
    (hex) of the file."""

    uri: str
    hash: str


class SimilarPair(NamedTuple):
    """A word and its similar word: token ids (`similar` is empty if there is none), and texts for people."""

    ids: tuple[int, ...]
    similar: tuple[int, ...]
    text: str = ""
    similar_text: str = ""


class _Header(BaseModel):  # first line of a table; `made`: settings of its making
    model_config = ConfigDict(strict=True, extra="forbid")

    format: str
    version: int
    tokenizer: str
    vocab_size: PositiveInt
    made: dict[str, Any]


@dataclass(frozen=True)
class WordsOfLength:
    """The W words of a table that have s tokens each, ordered by hash.

    Attributes:
        hashes: [W] uint64, hashes of the words, ascending.
        ids: [W, s] uint32, token ids of the words.
        similar: [W, s] uint32, token ids of the similar words; arbitrary for a word without one.
        has_similar: [W] bool, whether the word has a similar word.
    """

    hashes: NDArray[np.uint64]
    ids: NDArray[np.uint32]
    similar: NDArray[np.uint32]
    has_similar: NDArray[np.bool_]

    @classmethod
    def from_pairs(cls, pairs: Iterable[SimilarPair]) -> Self:
        """Return the table of words that all have the same size. Of words with equal hashes the first is kept."""
        listed = list(pairs)
        ids = np.array([pair.ids for pair in listed], dtype=np.uint32)
        similar = np.array([pair.similar or pair.ids for pair in listed], dtype=np.uint32)
        hashes, first = np.unique(_hash_words(ids), return_index=True)
        has_similar = np.array([bool(pair.similar) for pair in listed], dtype=np.bool_)
        return cls(hashes, ids[first], similar[first], has_similar[first])

    def find(self, words: NDArray[np.uint32]) -> NDArray[np.int64]:
        """Return [N], the index in the table of each of `words` [N, s]; -1 if the table lacks the word."""
        places = np.searchsorted(self.hashes, _hash_words(words))
        places = np.minimum(places, len(self.hashes) - 1)
        return np.where((self.ids[places] == words).all(axis=1), places, -1)


@dataclass(frozen=True)
class SimilarWords:
    """A table of similar words.

    Attributes:
        tokenizer: hash of the tokenizer whose ids the table holds.
        by_size: words of the table, by their number of tokens.
    """

    tokenizer: str
    by_size: Mapping[int, WordsOfLength]


def dump_similar_words(
    pairs: Iterable[SimilarPair], *, tokenizer: str, vocab_size: int, build_settings: Mapping[str, object]
) -> bytes:
    """Return the bytes of a table's file. The same words always give the same bytes.

    `build_settings`: settings with which the table was made; they are stored, but not used.
    """
    header = {
        "format": _FORMAT,
        "version": 1,
        "tokenizer": tokenizer,
        "vocab_size": vocab_size,
        "made": build_settings,
    }
    lines = [json.dumps(header, ensure_ascii=False, sort_keys=True)]
    for pair in sorted(pairs):
        ids, similar = (" ".join(map(str, word)) for word in (pair.ids, pair.similar))
        texts = (" ".join(text.split()) for text in (pair.text, pair.similar_text))
        lines.append("\t".join((ids, similar, *texts)))
    return ("\n".join(lines) + "\n").encode()


def table_hash(content: bytes) -> str:
    """Return the sha256 (hex) of a table's file, which identifies the table in a `StreamSpec`."""
    return hashlib.sha256(content).hexdigest()


def read_similar_words(uri: str) -> bytes:
    """Return the bytes of the file at a path or URI.

    Raises:
        CorpusError: the file does not exist.
        StoreError: the file cannot be read.
    """
    store, name = open_store_of_file(uri)
    try:
        return store.get(name)
    except KeyMissing as error:
        raise CorpusError(
            f"{uri}: no such table of similar words", remedy="make a table with `maskfleet corpus similar-words`"
        ) from error


def parse_similar_words(content: bytes, where: str) -> SimilarWords:
    """Return the table in a file's bytes. `where`: the file's name in errors.

    Raises CorpusError: the file is damaged or not such a table, or a newer version of Maskfleet wrote it.
    """
    try:
        first, *lines = content.decode().removesuffix("\n").split("\n")
        header = _Header.model_validate_json(first)
        if header.format == _FORMAT and header.version > 1:
            raise CorpusError(newer_version_message(where), remedy=NEWER_REMEDY)
        if (header.format, header.version) != (_FORMAT, 1):
            raise ValueError(f"the file has format {header.format}, version {header.version}")
        pairs = [_parse_line(line, header.vocab_size) for line in lines]
    except (UnicodeDecodeError, ValueError, ValidationError) as error:
        reason = str(error.errors()[0]["msg"]) if isinstance(error, ValidationError) else str(error)
        raise CorpusError(
            f"{where} is not a table of similar words: {reason}",
            remedy="make the table with `maskfleet corpus similar-words`, or restore it from a copy",
        ) from error
    by_size = groupby(sorted(pairs, key=lambda pair: len(pair.ids)), key=lambda pair: len(pair.ids))
    return SimilarWords(header.tokenizer, {size: WordsOfLength.from_pairs(of_size) for size, of_size in by_size})


def load_similar_words(source: SimilarSource | None, tokenizer_hash: str) -> SimilarWords:
    """Return the table that a `StreamSpec` refers to. `tokenizer_hash`: tokenizer of the corpora.

    Raises CorpusError: `source` is None, the file is missing or has another hash, or the table is of another tokenizer.
    """
    if source is None:
        raise CorpusError(
            "words are to be replaced by similar words, but no table of similar words is given",
            remedy="set similar_words.uri to a table made with `maskfleet corpus similar-words`",
        )
    content = read_similar_words(source.uri)
    found = table_hash(content)
    if found != source.hash:
        raise CorpusError(
            f"the table of similar words at {source.uri} has hash {found[:12]}, expected {source.hash[:12]}",
            remedy="give the URI of the table that the run was created with, or start a new run with this table",
        )
    return _parse_fitting_table(content, source.uri, tokenizer_hash)


def describe_similar_words_table(uri: str, tokenizer_hash: str) -> SimilarSource:
    """Return a `StreamSpec`'s reference to the table at `uri`. Raises CorpusError: it is missing or does not fit."""
    content = read_similar_words(uri)
    _parse_fitting_table(content, uri, tokenizer_hash)
    return SimilarSource(uri=uri, hash=table_hash(content))


def _parse_fitting_table(content: bytes, uri: str, tokenizer_hash: str) -> SimilarWords:
    """Parse a table's file. Raises CorpusError: as `parse_similar_words`, or the table is of another tokenizer."""
    table = parse_similar_words(content, uri)
    if table.tokenizer != tokenizer_hash:
        raise CorpusError(
            f"the similar words at {uri} are of tokenizer {table.tokenizer[:12]}, "
            f"but the corpora are of {tokenizer_hash[:12]}",
            remedy="make the table from these corpora with `maskfleet corpus similar-words`",
        )
    return table


def _parse_line(line: str, vocab_size: int) -> SimilarPair:
    fields = line.split("\t")
    if len(fields) != 4:
        raise ValueError(f"a line has {len(fields)} fields, not 4: {line[:60]!r}")
    ids, similar = (tuple(int(number) for number in field.split()) for field in fields[:2])
    if not ids or (similar and len(similar) != len(ids)):
        raise ValueError(f"a line has words of different lengths, {len(ids)} and {len(similar)} tokens: {line[:60]!r}")
    if not all(0 <= number < vocab_size for number in (*ids, *similar)):
        raise ValueError(f"a line has token ids outside the vocabulary of {vocab_size:,}: {line[:60]!r}")
    return SimilarPair(ids, similar, *fields[2:])


def _hash_words(words: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """Return [N] uint64, the hash of the token ids of each of `words` [N, s]."""
    found = np.zeros(len(words), dtype=np.uint64)
    for column in words.T:
        found = (found + column + np.uint64(1)) * _GOLDEN_RATIO
        found ^= found >> np.uint64(29)
    return found


def replace_words(
    target_ids: Tokens,
    sizes: NDArray[np.int64],
    draws: NDArray[np.uint64],
    replace: Replacement,
    vocabulary: Vocabulary,
    table: SimilarWords,
) -> Tokens:
    """Return [M], the ids that replace the targets.

    Args:
        target_ids: [M], ids of the targets, word after word.
        sizes: [K], number of tokens of each word.
        draws: [M] uniform 64-bit draws. In the draw of a word's first token, the upper half decides how the word is
            replaced, and the lower half chooses a random word. The lower half of a token's draw chooses a random token.
    """
    starts = np.cumsum(sizes) - sizes
    action = draws[starts] >> np.uint64(32)
    bounds = np.cumsum([replace.mask, replace.similar, replace.random])
    masked, similar, random = (action < round(bound * UINT32_RANGE) for bound in bounds)
    similar, random = similar & ~masked, random & ~similar & ~masked
    ids = target_ids.copy()
    ids[np.repeat(masked, sizes)] = vocabulary.mask
    for size in np.unique(sizes[similar | random]).tolist():
        words = np.flatnonzero((sizes == size) & (similar | random))
        places = starts[words][:, None] + np.arange(size)
        ids[places] = _choose_replacements(ids[places], similar[words], draws[places], vocabulary, table)
    return ids


def _choose_replacements(
    words: NDArray[np.unsignedinteger],
    similar: NDArray[np.bool_],
    draws: NDArray[np.uint64],
    vocabulary: Vocabulary,
    table: SimilarWords,
) -> NDArray[np.unsignedinteger]:
    """Return [N, s], similar or random words to replace `words` [N, s].

    A word gets its similar word if `similar` [N] is true and the table has one, else a random word. `draws`: [N, s].
    """
    low = draws.astype(np.uint32)
    known = table.by_size.get(words.shape[1])
    if known is None:
        return vocabulary.draw_ids(low.ravel()).reshape(words.shape)
    found = known.ids[scale_draws(low[:, 0], len(known.ids))]
    number = known.find(words.astype(np.uint32))
    has = similar & (number >= 0) & known.has_similar[number]
    found[has] = known.similar[number[has]]
    return found.astype(words.dtype)
