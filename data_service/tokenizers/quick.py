"""Encodes texts with libraries that are many times faster than `tokenizers`, the reference: fastokens for byte-level
BPE, splintr for WordPiece and Unigram.

Their results are checked against the reference. The first texts are encoded with both; after a difference the library
is not used any more. Each character is tried with both before the first text that has it, since the libraries' versions
of Unicode differ; texts with a character that differs are encoded by the reference. The libraries return ids without
character offsets. These are computed from the bytes of the pieces, or from words, which are counted in the text and in
the tokens. If the counts differ, the reference encodes the text.
"""

import json
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_service.characters import CharacterClasses, code_points
from data_service.errors import TokenizerError
from data_service.tokenizers.files import library_errors
from data_service.tokenizers.tokenizer import Kind, PlacedTokens, Tokenizer
from data_service.tokenizers.words import SPACE_MARK

TESTED_VERSIONS = {"fastokens": "0.3.5", "splintr-rs": "0.22.0"}
"""The versions that were tested on millions of texts; other versions are not used."""

# Number of characters that a new encoder also encodes with the reference, to compare the tokens.
COMPARED_CHARACTERS = 1 << 14
# Smallest amount of text for which a quick library saves more time than opening it takes.
MIN_QUICK_TEXT_BYTES = 1 << 20
_MEMORY_CHECK_CHARACTERS = 1 << 22  # characters between two checks of the process's memory
# Memory growth after which a library is reopened to empty its cache: fastokens caches every word.
_MAX_CACHE_GROWTH_BYTES = 1 << 27

_LIBRARIES: dict[Kind, str] = {"byte_bpe": "fastokens", "wordpiece": "splintr-rs", "unigram": "splintr-rs"}
_UNICODE_FORMS = ("NFC", "NFKC", "NFD", "NFKD")  # normalizers that byte-level BPE may have
# Classes of characters: dropped; between words; part of a word; a word alone; encoded differently; not tried yet.
_REMOVED, _SEPARATOR, _LETTER, _WORD, _DIFFERING, _UNTRIED = range(6)
_TRIAL_CONTEXTS = ("a{0}a", "a {0} a", "ab{0}de {0} {0}{0} x{0}1{0}. {0}")  # texts to try a character {0} in
_CLASS_BY_WORD_COUNTS = {(1, 2): _REMOVED, (2, 2): _SEPARATOR, (1, 3): _LETTER, (3, 3): _WORD}
"""Class of a character by the numbers of words in the first two of `_TRIAL_CONTEXTS`."""

_Ids = NDArray[np.uint32]


class _UnsuitableTokenizer(Exception):
    """The quick libraries cannot be used for a tokenizer. The exception's text is the reason."""


class TextEncoder:
    """An encoder with the results of `Tokenizer.encode_placed` that uses a quicker library where the ids are the same.

    Attributes:
        counts: number of texts by library and version; if only the reference can be used, with the reason.
    """

    def __init__(self, tokenizer: Tokenizer, text_bytes: int = MIN_QUICK_TEXT_BYTES) -> None:
        """`text_bytes`: estimated size of all text; below `MIN_QUICK_TEXT_BYTES` only the reference is used."""
        self.counts = Counter[str]()
        self._tokenizer = tokenizer
        self._untried = COMPARED_CHARACTERS
        self._definition = f"tokenizers {version('tokenizers')}"
        self._quick: _QuickEncoder | None = None
        self._reason = ""
        try:
            self._quick = _quick_encoder(tokenizer) if text_bytes >= MIN_QUICK_TEXT_BYTES else None
        except _UnsuitableTokenizer as reason:
            self._reason = f" ({reason})"

    def encode_placed(self, texts: Sequence[str], place_by_word: bool = False) -> list[PlacedTokens]:
        """Return the tokens of each text. `place_by_word`: whether a token may have the character range of its word."""
        found = [self._quick.encode(text, place_by_word) if self._quick is not None else None for text in texts]
        tried = self._count_texts_to_compare(texts) if self._quick is not None else 0
        chosen = [number for number, tokens in enumerate(found) if tokens is None or number < tried]
        placed = self._tokenizer.encode_placed([texts[number] for number in chosen])
        defined = dict(zip(chosen, placed, strict=True))
        if any(tokens is not None and not _same_tokens(defined[n], tokens) for n, tokens in enumerate(found[:tried])):
            assert self._quick is not None
            self._reason, self._quick = f" ({self._quick.name} differs)", None
            return self.encode_placed(texts, place_by_word)
        defining = self._definition + self._reason
        library = defining if self._quick is None else self._quick.name
        self.counts += Counter(defining if tokens is None else library for tokens in found)
        return [defined[number] if tokens is None else tokens for number, tokens in enumerate(found)]

    def _count_texts_to_compare(self, texts: Sequence[str]) -> int:
        """Return how many of the texts must also be encoded by the reference; count their characters as compared."""
        number = 0
        while number < len(texts) and self._untried > 0:
            self._untried -= len(texts[number])
            number += 1
        return number


@lru_cache(maxsize=1)
def _quick_encoder(tokenizer: Tokenizer) -> "_QuickEncoder":
    return _QuickEncoder(tokenizer)


def _same_tokens(defined: PlacedTokens, quick: PlacedTokens) -> bool:
    """Return whether ids and character ranges are equal. If `quick` has ranges of words, tokens of `defined` must lie
    between the previous and the next word."""
    if not quick.by_word or not np.array_equal(defined.ids, quick.ids):
        return defined.equals(quick)
    starts, ends = np.unique(quick.starts), np.append(0, np.unique(quick.ends))
    word = np.searchsorted(starts, quick.starts)
    behind = np.append(starts[1:], np.iinfo(np.int64).max)
    return bool((ends[word] <= defined.starts).all() and (defined.ends <= behind[word]).all())


class _QuickEncoder:
    """A quicker library opened for one tokenizer, and the class of each character tried so far."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Open the library. Raises _UnsuitableTokenizer."""
        library = _LIBRARIES.get(tokenizer.kind)
        if library is None:
            raise _UnsuitableTokenizer("no quicker library gives the same ids")
        try:
            installed = version(library)
        except PackageNotFoundError as error:
            raise _UnsuitableTokenizer(f"{library} is not installed") from error
        if installed != TESTED_VERSIONS[library]:
            raise _UnsuitableTokenizer(f"{library} is {installed}, only {TESTED_VERSIONS[library]} was tested")
        self.name = f"{library} {installed}"
        self._tokenizer = tokenizer
        self._definition = tokenizer.text_definition
        self._pieces = _piece_rules(tokenizer, json.loads(self._definition))
        self._classes = CharacterClasses(_UNTRIED)
        self._characters, self._most_bytes = 0, _resident_bytes() + _MAX_CACHE_GROWTH_BYTES
        try:
            with library_errors(self.name):
                self._library = OPENERS[library](self._definition)
        except TokenizerError as error:
            raise _UnsuitableTokenizer(f"{self.name} cannot read the tokenizer") from error
        self._classify_characters(np.arange(128))

    def encode(self, text: str, by_word: bool) -> PlacedTokens | None:
        """Return the tokens of a text; None if the reference must encode it."""
        if not by_word and self._pieces.widths is None:
            return None
        classes = self._classes.classify(text)
        untried = classes == _UNTRIED
        if untried.any():
            self._classify_characters(np.unique(code_points(text)[untried]))
            classes = self._classes.classify(text)
        if (classes == _DIFFERING).any():
            return None
        ids = self._encode_ids(text)
        if ids is None:
            return None
        if self._pieces.widths is not None:
            return _place_by_bytes(text, ids, self._pieces, self._tokenizer.id_dtype)
        return _place_by_words(classes, ids, self._pieces, self._tokenizer.id_dtype)

    def _encode_ids(self, text: str) -> _Ids | None:
        self._characters += len(text)
        if self._characters > _MEMORY_CHECK_CHARACTERS:
            self._characters = 0
            if _resident_bytes() > self._most_bytes:
                self._library = OPENERS[self.name.split()[0]](self._definition)
                self._most_bytes = _resident_bytes() + _MAX_CACHE_GROWTH_BYTES
        try:
            with library_errors(self.name):
                return self._library(text)
        except TokenizerError:
            return None

    def _classify_characters(self, codes: NDArray[np.integer[Any]]) -> None:
        """Enter the classes of characters in the table, by encoding each in `_TRIAL_CONTEXTS` with both libraries."""
        contexts = [context.format(chr(code)) for code in codes.tolist() for context in _TRIAL_CONTEXTS]
        defined = self._tokenizer.encode_batch(contexts)
        for place, code in enumerate(codes.tolist()):
            of_code = slice(place * len(_TRIAL_CONTEXTS), (place + 1) * len(_TRIAL_CONTEXTS))
            quick = map(self._encode_ids, contexts[of_code])
            same = all(q is not None and np.array_equal(q, d) for q, d in zip(quick, defined[of_code], strict=True))
            self._classes.table[code] = self._class_from_contexts(defined[of_code]) if same else _DIFFERING

    def _class_from_contexts(self, contexts: Sequence[NDArray[Any]]) -> int:
        """Return the class of a character from the ids of the texts that `_TRIAL_CONTEXTS` makes with it."""
        begins = self._pieces.begins
        if begins is None:
            return _LETTER
        alone, spaced = (int(begins[ids].sum()) for ids in contexts[:2])
        return _CLASS_BY_WORD_COUNTS.get((alone, spaced), _DIFFERING)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class _PieceRules(NamedTuple):
    """Properties of pieces from which the character ranges of tokens are computed.

    `widths`: [vocab_size], bytes of each piece (byte-level BPE only). `begins`: [vocab_size], whether a piece begins a
    word (other kinds). `added`: [vocab_size], whether a piece is an added token, which gets no range. `unknown`: id of
    the unknown token. `spaces`: whether pieces mark words by a space. With such pieces or unknown tokens, the
    ranges of the reference, `tokenizers`, begin too early after removed characters. `form`: Unicode normalization form
    (byte-level BPE).
    """

    widths: NDArray[np.int64] | None
    begins: NDArray[np.bool_] | None
    added: NDArray[np.bool_]
    unknown: int
    spaces: bool = False
    form: str | None = None


def _piece_rules(tokenizer: Tokenizer, definition: dict[str, Any]) -> _PieceRules:
    """Raises _UnsuitableTokenizer: character ranges cannot be computed for this tokenizer."""
    added = np.zeros(tokenizer.vocab_size, dtype=np.bool_)
    added[[token["id"] for token in definition["added_tokens"] if token["id"] != tokenizer.special.unk]] = True
    normalizer, splitter = definition["normalizer"] or {}, definition["pre_tokenizer"] or {}
    if tokenizer.kind == "byte_bpe":
        form = normalizer.get("type")
        if form not in (None, *_UNICODE_FORMS):
            raise _UnsuitableTokenizer(f"the normalizer {form} changes texts")
        widths = [len(piece.encode() if own else piece) for piece, own in zip(tokenizer.pieces, added, strict=True)]
        return _PieceRules(np.array(widths, dtype=np.int64), None, added, tokenizer.special.unk, form=form)
    steps = splitter.get("pretokenizers", [splitter])
    names = [step.get("type") for step in steps]
    words = tokenizer.kind == "wordpiece" and names == ["BertPreTokenizer"]
    spaces = names[-1:] == ["Metaspace"] and set(names[:-1]) <= {"WhitespaceSplit"}
    if spaces:
        spaces = steps[-1].get("split", True) and steps[-1].get("prepend_scheme", "always") != "never"
        # Stripping an accent between two spaces leaves two spaces.
        spaces &= len(names) > 1 or "StripAccents" not in json.dumps(normalizer)
    if not words and not (spaces and tokenizer.kind == "unigram"):
        raise _UnsuitableTokenizer("it splits words by unsupported rules")
    prefix = definition["model"].get("continuing_subword_prefix", "##")
    begins = [not p.startswith(prefix) if words else p.startswith(SPACE_MARK) for p in tokenizer.pieces]
    return _PieceRules(None, np.array(begins, dtype=np.bool_), added, tokenizer.special.unk, bool(spaces))


def _place_by_bytes(text: str, ids: _Ids, pieces: _PieceRules, dtype: np.dtype[Any]) -> PlacedTokens | None:
    """Compute tokens' character ranges from the bytes of pieces; None if pieces and text differ in length."""
    assert pieces.widths is not None
    plain = text.encode()
    widths = pieces.widths.take(ids)
    ends = np.cumsum(widths)
    starts = ends - widths
    prefixed = int(ends[-1]) - len(plain) if len(ends) else -len(plain)
    if prefixed == 1 and text and text[0] != " ":  # the tokenizer put a space before the text
        starts, ends, prefixed = np.maximum(starts - 1, 0), np.maximum(ends - 1, 1), 0
    if prefixed or (pieces.form is not None and not unicodedata.is_normalized(pieces.form, text)):  # type: ignore[arg-type]
        return None
    if len(plain) > len(text):
        character = np.cumsum((np.frombuffer(plain, dtype=np.uint8) & 0xC0) != 0x80)
        starts, ends = character[starts] - 1, character[ends - 1]
    return PlacedTokens(ids.astype(dtype), starts, ends)


def _place_by_words(
    classes: NDArray[np.uint8], ids: _Ids, pieces: _PieceRules, dtype: np.dtype[Any]
) -> PlacedTokens | None:
    """Give tokens the character ranges of their words; None if text and tokens differ in their number of words."""
    assert pieces.begins is not None
    kept = classes != _REMOVED
    removed = not kept.all()
    if removed and (pieces.spaces or (ids == pieces.unknown).any()):
        return None
    if removed:
        classes = classes[kept]
    alone, content = classes == _WORD, classes >= _LETTER
    begins, ends = content.copy(), content.copy()
    begins[1:] &= ~content[:-1] | alone[:-1] | alone[1:]
    ends[:-1] &= begins[1:] | ~content[1:]
    starts, stops = np.flatnonzero(begins), np.flatnonzero(ends) + 1
    if removed:
        characters = np.flatnonzero(kept)
        starts, stops = characters[starts], characters[stops - 1] + 1
    first = pieces.begins.take(ids)
    if np.count_nonzero(first) != len(starts) or (len(ids) and not first[0]) or pieces.added.take(ids).any():
        return None
    words = np.cumsum(first) - 1
    return PlacedTokens(ids.astype(dtype), starts.take(words), stops.take(words), by_word=True)


def _open_fastokens(definition: str) -> Callable[[str], _Ids]:
    import fastokens  # type: ignore[import-untyped]

    library = fastokens.Tokenizer.from_json_str(definition)

    def encode_ids(text: str) -> _Ids:
        # With a single text per call fastokens starts no threads, so that the process can be forked afterwards.
        found, _ = library.encode_batch_flat([text], add_special_tokens=False, split_special_tokens=True)
        return np.frombuffer(found, dtype="<u4")

    return encode_ids


def _open_splintr(definition: str) -> Callable[[str], _Ids]:
    import splintr

    rules = json.loads(definition)
    unknown = rules["model"].get("unk_id")
    # splintr finds the unknown piece only by this name (findings/splintr_drops_unknown_pieces.sh).
    if unknown is not None:
        rules["model"]["vocab"][unknown][0] = "<unk>"
    library = splintr.from_json_bytes(json.dumps(rules).encode())
    return lambda text: np.frombuffer(library.encode_flat(text), dtype="<u4")


OPENERS: dict[str, Callable[[str], Callable[[str], _Ids]]] = {  # by library: opens it for a tokenizer.json
    "fastokens": _open_fastokens,
    "splintr-rs": _open_splintr,
}
