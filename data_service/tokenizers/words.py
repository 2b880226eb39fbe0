"""Finds the pieces that begin a word, for whole-word, n-gram and span masking.

A word extends from a piece that begins a word up to the next such piece. Masking also lets the first piece
after a special token begin a word, because byte-level BPE has no space before a document's first word.

Some scripts put no space between words: Han, kana, Thai, Lao, Tibetan, Burmese, Khmer and a few more. There a piece
that begins with a letter begins a word, as BERT treats every Chinese character as a word. A piece of several
characters stays whole; vowel signs, digits, marks and Latin letters belong to the character before them. A piece that
is only part of a character begins a word if its bytes identify the script: the first byte is enough for most Han
characters, two bytes for all. So text in scripts with spaces has the same words as by the older rules (version 1).
"""

import re
import string
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

RULES_VERSION = 2  # current version of the rules; version 1 treats all scripts as if they had spaces

SPACE_MARK = "\u2581"  # SentencePiece's character for a space before a word
CONTINUATION_PREFIX = "##"  # prefix of WordPiece pieces inside a word
_PUNCTUATION = frozenset(string.punctuation) - {"'"}  # each begins a word in SentencePiece
_LATIN_OR_PUNCTUATION = frozenset(string.ascii_letters + string.digits + string.punctuation)
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's piece for a single byte

# GPT-2's byte alphabet: printable bytes stand for themselves, the others are letters from U+0100 on, in order.
_PRINTED_BYTES = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
BYTES_BY_LETTER = {chr(byte): byte for byte in _PRINTED_BYTES} | {
    chr(0x100 + i): byte for i, byte in enumerate(sorted(set(range(0x100)) - set(_PRINTED_BYTES)))
}
_BYTE_WHITESPACE = tuple(chr(0x100 + ord(space)) for space in " \t\n\r\v\f")  # white space in that alphabet

# (first, last) code points of letters that each begin a word: Thai, Lao, Tibetan, Burmese, Khmer, Tai Le, New Tai
# Lue, Tai Tham, the signs that repeat or stand for a Han character, kana, Han, Tai Viet, Han again, half-width kana,
# Han beyond U+FFFF.
# fmt: off
LETTERS_WITHOUT_SPACES = (
    (0x0E01, 0x0E2E), (0x0E40, 0x0E44), (0x0E81, 0x0EAE), (0x0EC0, 0x0EC4), (0x0EDC, 0x0EDF), (0x0F40, 0x0F6C),
    (0x1000, 0x102A), (0x1780, 0x17B3), (0x1950, 0x1974), (0x1980, 0x19AB), (0x1A20, 0x1A54), (0x3005, 0x3007),
    (0x3041, 0x3096), (0x309D, 0x309F), (0x30A1, 0x30FA), (0x30FD, 0x30FF), (0x31F0, 0x31FF), (0x3400, 0x9FFF),
    (0xAA80, 0xAAAF), (0xF900, 0xFAFF), (0xFF66, 0xFF9D), (0x20000, 0x3FFFF),
)
# fmt: on
# Unicode blocks of these letters, to judge characters of which only the first bytes are known.
_UNSPACED_BLOCKS = (
    (0x0E00, 0x109F),
    (0x1780, 0x17FF),
    (0x3040, 0x30FF),
    (0x3400, 0x9FFF),
    (0xF900, 0xFAFF),
    (0x20000, 0x3FFFF),
)


def word_start_table(
    kind: Literal["byte_bpe", "wordpiece", "unigram", "bpe", "wordlevel"],
    pieces: Sequence[str],
    special: NDArray[np.bool_],
    rules_version: int = RULES_VERSION,
) -> NDArray[np.bool_]:
    """Return [vocab] bool, read-only: which pieces begin a word. Every special token does.

    byte_bpe: a piece that begins with whitespace (fairseq's rule for GPT-2's BPE); punctuation joins the word
    before it.
    wordpiece, wordlevel: every piece without "##" (google-research/bert, create_pretraining_data.py).
    unigram, bpe: a piece that begins with the space mark, a piece that is one punctuation mark, and a piece
    without any ASCII letter, digit or mark, so that every CJK piece is a word (google-research/albert,
    create_pretraining_data.py, except that digits and apostrophes continue a word here). Of byte-fallback pieces
    only the first bytes of Han characters do.
    All: a piece that begins with a letter of a script without spaces (from `rules_version` 2 on).
    """
    begins = {
        "byte_bpe": _starts_word_byte_bpe,
        "wordpiece": _starts_word_wordpiece,
        "wordlevel": _starts_word_wordpiece,
        "unigram": _starts_word_sentencepiece,
        "bpe": _starts_word_sentencepiece,
    }[kind]
    starts = np.array([begins(piece, rules_version > 1) for piece in pieces], dtype=np.bool_) | special
    starts.flags.writeable = False
    return starts


def _starts_word_byte_bpe(piece: str, unspaced: bool) -> bool:
    """`unspaced`: whether letters of scripts without spaces begin words (from version 2 of the rules on)."""
    first = bytes(BYTES_BY_LETTER.get(character, 0) for character in piece[:4])
    return piece.startswith(_BYTE_WHITESPACE) or (unspaced and _begins_unspaced(first))


def _starts_word_wordpiece(piece: str, unspaced: bool) -> bool:
    rest = piece.removeprefix(CONTINUATION_PREFIX)
    return bool(piece) and (rest == piece or (unspaced and _begins_unspaced(rest[:1].encode())))


def _starts_word_sentencepiece(piece: str, unspaced: bool) -> bool:
    if piece.startswith(SPACE_MARK) or piece in _PUNCTUATION:
        return True
    if byte := _BYTE_PIECE.fullmatch(piece):
        return unspaced and _begins_unspaced(bytes.fromhex(byte[1]))
    return bool(piece) and not _LATIN_OR_PUNCTUATION.intersection(piece)


def _begins_unspaced(content: bytes) -> bool:
    """Return whether every UTF-8 text with these first bytes begins with a letter of a script without spaces."""
    if not content or content[0] < 0xE0:  # letters of scripts without spaces take three or four bytes
        return False
    length = 3 if content[0] < 0xF0 else 4
    first = content[:length]
    low, high = (_code_point(first.ljust(length, filler)) for filler in (b"\x80", b"\xbf"))
    ranges = LETTERS_WITHOUT_SPACES if low == high else _UNSPACED_BLOCKS
    return any(start <= low and high <= stop for start, stop in ranges)


def _code_point(character: bytes) -> int:
    """Return the code point of a character from its three or four UTF-8 bytes."""
    code = character[0] & (0x0F if len(character) == 3 else 0x07)
    for byte in character[1:]:
        code = code << 6 | (byte & 0x3F)
    return code
