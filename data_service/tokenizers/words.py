"""Which pieces begin a word: what whole-word, n-gram and span masking need to know about a vocabulary.

A word runs from one flagged piece up to the next. Whoever masks treats the first piece after a special token
as the beginning of a word too, flagged or not: byte-level BPE writes a document's first word without the
space that marks one.
"""

import string
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray

_SPACE = "\u2581"  # SentencePiece's mark for a space before the piece
_PUNCTUATION = frozenset(string.punctuation) - {"'"}
_LATIN_OR_PUNCTUATION = frozenset(string.ascii_letters + string.digits + string.punctuation)

# GPT-2's byte alphabet prints these bytes as the letters U+0100 + byte.
_BYTE_WHITESPACE = tuple(chr(0x100 + ord(space)) for space in " \t\n\r\v\f")


def word_starts(
    kind: Literal["byte_bpe", "wordpiece", "unigram", "bpe"],
    pieces: Sequence[str],
    special: NDArray[np.bool_],
) -> NDArray[np.bool_]:
    """[vocab] bool, read-only. Special tokens are words of their own.

    byte_bpe: a piece that begins with whitespace (fairseq's rule for GPT-2's BPE); punctuation joins the word
    before it.
    wordpiece: every piece without "##" (google-research/bert, create_pretraining_data.py).
    unigram, bpe: a piece that begins with the space mark, a piece that is one punctuation mark, and a piece
    without any ASCII letter, digit or mark, so that every CJK piece is a word (google-research/albert,
    create_pretraining_data.py, except that digits and apostrophes continue a word here). Byte-fallback pieces
    never begin one.
    """
    match kind:
        case "byte_bpe":
            flags = [piece.startswith(_BYTE_WHITESPACE) for piece in pieces]
        case "wordpiece":
            flags = [bool(piece) and not piece.startswith("##") for piece in pieces]
        case "unigram" | "bpe":
            flags = [_begins_sentencepiece_word(piece) for piece in pieces]
    starts = np.array(flags, dtype=np.bool_) | special
    starts.flags.writeable = False
    return starts


def _begins_sentencepiece_word(piece: str) -> bool:
    if piece.startswith(_SPACE) or piece in _PUNCTUATION:
        return True
    return bool(piece) and not _LATIN_OR_PUNCTUATION.intersection(piece)
