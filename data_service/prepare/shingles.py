"""Cuts a text into units (about words), and hashes its shingles: all runs of a few consecutive units.

A unit is a run of letters, digits and combining marks. A letter of a script without spaces (`tokenizers/words.py`: Han,
kana, Thai, Khmer ...) starts a new unit, so there a unit is about a character. In a run of more than `MAX_UNIT_LETTERS`
letters every character is a unit, so that texts in other scripts without spaces are compared, too. Case, Unicode forms,
punctuation and white space make no difference. In a text without letters and digits every character except white space
is a unit.

NumPy arrays hold all hashes. The hash of a unit is a polynomial in the hashes of its characters (Rabin and Karp); the
hash of a shingle combines the hashes of its units.
"""

import unicodedata
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from data_service.tokenizers.words import LETTERS_WITHOUT_SPACES

MAX_UNIT_LETTERS = 32  # largest number of letters in a unit
_BEGINS_UNIT, _CONTINUES_UNIT = np.uint8(2), np.uint8(1)  # kinds of characters in units; other characters: 0
HASH_FACTOR = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, odd: powers spread over 64 bits
_MIX_FACTOR = np.uint64(0xD6E8FEB86659FD93)  # odd multiplier of Pelle Evensen's hash rrmxmx
_MIX_SHIFT_BITS = np.uint64(32)
_CHUNK_CHARACTERS = 1 << 20  # characters hashed at a time


def hash_shingles(text: str, words_per_shingle: int) -> NDArray[np.uint64]:
    """Return [S] hashes of all runs of `words_per_shingle` units of a text. A shorter text is a single shingle.

    A text of white space alone has no shingles.
    """
    units = hash_units(text)
    return hash_runs(units, min(words_per_shingle, len(units)))


def hash_units(text: str) -> NDArray[np.uint64]:
    """Return [U] hashes of a text's units."""
    return np.concatenate([_hash_piece_units(piece) for piece in _folded_pieces(text)])


def hash_units_by_line(text: str) -> tuple[list[str], NDArray[np.uint64], NDArray[np.int64]]:
    """Return the lines of a text, [U] hashes of their units, and [U] the number of each unit's line.

    The units are those of `hash_units`, except where a cut at `_CHUNK_CHARACTERS` splits a unit.
    """
    lines = text.split("\n")
    found = [hash_units(line) if _has_units(line) else np.empty(0, dtype=np.uint64) for line in lines]
    return lines, np.concatenate(found), np.repeat(np.arange(len(lines)), [len(units) for units in found])


def _has_units(text: str) -> bool:
    """Return whether a text has a letter or digit."""
    return bool(_character_kinds()[_code_points("".join(_folded_pieces(text)))].any())


def _code_points(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", errors="surrogatepass"), dtype=np.uint32)


def hash_runs(units: NDArray[np.uint64], span: int) -> NDArray[np.uint64]:
    """Return [U - span + 1] hashes of all runs of `span` units; [0] if there are fewer units, or `span` is 0."""
    count = len(units) - span + 1 if span else 0
    if count <= 0:
        return np.empty(0, dtype=np.uint64)
    found = np.full(count, np.uint64(span))
    for offset in range(span):
        found = (found ^ units[offset : offset + count]) * _MIX_FACTOR
        found ^= found >> _MIX_SHIFT_BITS
    return found


def _folded_pieces(text: str) -> list[str]:
    """Return the text with case and Unicode forms folded, in pieces of at most `_CHUNK_CHARACTERS` characters. Pieces
    end at a space where possible."""
    plain = text.lower() if text.isascii() else _fold_forms(text)
    pieces, start = [], 0
    while len(plain) - start > _CHUNK_CHARACTERS:
        stop = plain.rfind(" ", start, start + _CHUNK_CHARACTERS)
        stop = stop if stop > start else start + _CHUNK_CHARACTERS
        pieces.append(plain[start:stop])
        start = stop
    return [*pieces, plain[start:]]


def _fold_forms(text: str) -> str:
    """Return the text with case and Unicode forms folded. NFKC must also come first: it turns "™" into capitals."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold())


def _hash_piece_units(text: str) -> NDArray[np.uint64]:
    """Return [U] hashes of the units of one piece of a text."""
    codes = _code_points(text)
    kinds = _character_kinds()[codes]
    inside = kinds != 0
    before = np.append(False, inside[:-1])
    starts = inside & (~before | (kinds == _BEGINS_UNIT))
    places = np.flatnonzero(inside)
    if not len(places):
        spaces = np.fromiter(map(str.isspace, text), dtype=np.bool_, count=len(text))
        return mix_bits(codes[~spaces].astype(np.uint64))
    first = np.flatnonzero(starts[places])
    lengths = np.diff(np.append(first, len(places)))
    if (lengths > MAX_UNIT_LETTERS).any():
        alone = np.repeat(lengths > MAX_UNIT_LETTERS, lengths)
        first = np.flatnonzero(starts[places] | alone)
        lengths = np.diff(np.append(first, len(places)))
    powers = _hash_factor_powers()[np.arange(len(places)) - np.repeat(first, lengths)]
    return mix_bits(np.add.reduceat(mix_bits(codes[places].astype(np.uint64)) * powers, first))


def mix_bits(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each number: its bits mixed."""
    values = (values + np.uint64(1)) * _MIX_FACTOR
    values ^= values >> _MIX_SHIFT_BITS
    return values * _MIX_FACTOR


@lru_cache(maxsize=1)
def _hash_factor_powers() -> NDArray[np.uint64]:
    """Return [MAX_UNIT_LETTERS] powers of `HASH_FACTOR`, modulo 2**64."""
    return np.array([pow(HASH_FACTOR, i, 1 << 64) for i in range(MAX_UNIT_LETTERS)], dtype=np.uint64)


@lru_cache(maxsize=1)
def _character_kinds() -> NDArray[np.uint8]:
    """Return [0x110000] uint8: for each code point `_BEGINS_UNIT`, `_CONTINUES_UNIT`, or 0 outside units."""
    kinds = np.array([unicodedata.category(chr(code))[0] in "LNM" for code in range(0x110000)], dtype=np.uint8)
    for start, stop in LETTERS_WITHOUT_SPACES:
        kinds[start : stop + 1] *= _BEGINS_UNIT
    kinds.flags.writeable = False
    return kinds
