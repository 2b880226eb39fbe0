"""Splits text into the words that a trainer counts: the pre-tokens of the library `tokenizers`, but faster than the
library, which takes about 10 us per pre-token.

Text is cut at spaces into pieces that the library would split in the same way alone, so each distinct piece is split
only once, by a regular expression over the classes of its characters. The classes are found by trials with the library.
"""

import re
from collections.abc import Callable, Iterator
from typing import Protocol

from tokenizers import normalizers, pre_tokenizers

RUN_CHARACTERS = 1000  # longer words are cut; the trainers' time is quadratic in a word's length
_SKIPPED_CHARACTER = "\u2585"  # block element; SentencePiece silently skips lines that contain it
_WINDOW_CHARACTERS = 1 << 20  # about how many characters are split at a time
_RUN_OR_SPACES = re.compile(rf"\s*+\S{{1,{RUN_CHARACTERS}}}+|\s++")  # parts of a text with long words cut
# White space without \x1c to \x1f, which are white space only for Python.
_WHITE_SPACE = r"\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_SPACE_BEFORE_WORD = re.compile(rf"[ \n](?=[^{_WHITE_SPACE}\x1c-\x1f])")  # where a text may be cut into windows


class WordSplitter(Protocol):
    """A splitter of text into pieces, and of pieces into words. How a piece is split does not depend on its context."""

    def split_into_pieces(self, text: str) -> list[str]:
        """Return the pieces of a text, cut at white space."""

    def split_into_words(self, piece: str) -> list[str]:
        """Return the words of a piece, as the library `tokenizers` splits them."""


def split_text(text: str, splitter: WordSplitter) -> Iterator[tuple[list[str], int]]:
    """Yield (pieces, length of the longest piece) for each window of a text. Runs without white space are cut after
    RUN_CHARACTERS characters."""
    start = 0
    while start < len(text):
        found = _SPACE_BEFORE_WORD.search(text, start + _WINDOW_CHARACTERS)
        stop = found.start() if found else len(text)
        window = text[start:stop]
        pieces = splitter.split_into_pieces(window)
        longest = max(map(len, pieces), default=0)
        if longest > RUN_CHARACTERS:
            pieces = [piece for part in _RUN_OR_SPACES.findall(window) for piece in splitter.split_into_pieces(part)]
        yield pieces, longest
        start = stop


class _ClassCache(dict[int, str]):
    """A cache of each character's class, by code point."""

    def __init__(self, classify: Callable[[str], str]) -> None:
        self._classify = classify

    def __missing__(self, code: int) -> str:
        self[code] = self._classify(chr(code))
        return self[code]


class ByteBpeSplitter:
    """Splits text like GPT-2's regular expression; a word includes the space before it. Pieces have an added space
    before each line end, and lack the space before their first word. A piece that begins with a space is the beginning
    of a text, without a space before its first word."""

    _SPLIT = re.compile(rf" (?=\n?[^{_WHITE_SPACE}])").split
    _WORDS = re.compile(
        r"'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[0-9]+| ?[^\t-\r A-Za-z0-9]+|[\t-\r ]+(?![^\t-\r ])|[\t-\r ]+"
    )

    def __init__(self) -> None:
        self._classes = _ClassCache(self._classify)
        self._split = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str

    def split_into_pieces(self, text: str) -> list[str]:
        first, *others = self._SPLIT(text.replace("\n", " \n"))
        return [*others, f" {first}"] if first else others

    def split_into_words(self, piece: str) -> list[str]:
        text = piece if piece[0] == "\n" else piece[1:] if piece[0] == " " else f" {piece}"
        text = text.replace(" \n", "\n")
        if text.isascii():
            return self._WORDS.findall(text)
        classes = text.translate(self._classes)
        return [text[found.start() : found.end()] for found in self._WORDS.finditer(classes)]

    def _classify(self, character: str) -> str:
        if character.isascii():
            return character
        alike = (kind for kind in "A0!" if len(self._split(kind + character)) == 1)
        return next(alike, "\t")  # a letter, a digit or another character, else white space


class BertSplitter:
    """Splits text like BERT: normalised text at white space and punctuation. A piece has no white space.

    Args:
        normalizer: normalizer of the tokenizer.
        lowercase: whether the normalizer folds case.
    """

    # Characters that BERT removes, although Python regards them as white space.
    _REMOVED = re.compile("[\v\f\x1c-\x1f\x85]")
    _WORDS = re.compile("a+|!")

    def __init__(self, normalizer: normalizers.Normalizer, lowercase: bool) -> None:
        self._normalised = _make_piece_normalizer(normalizer, lowercase)
        self._classes = _ClassCache(self._classify)
        self._split = pre_tokenizers.BertPreTokenizer().pre_tokenize_str

    def split_into_pieces(self, text: str) -> list[str]:
        return self._REMOVED.sub("", text).split()

    def split_into_words(self, piece: str) -> list[str]:
        text = self._normalised(piece)
        found = self._WORDS.finditer(text.translate(self._classes))
        return [text[word.start() : word.end()] for word in found]

    def _classify(self, character: str) -> str:
        return "?a !"[len(self._split(f"a{character}a"))]  # 1 word: a letter; 2: white space; 3: punctuation


class SentencePieceSplitter:
    """Splits text like SentencePiece: normalised text at white space. A piece has no white space. Arguments: as for
    `BertSplitter`."""

    _WORDS = re.compile(r"[\S\x1f]+")

    def __init__(self, normalizer: normalizers.Normalizer, lowercase: bool) -> None:
        self._normalised = _make_piece_normalizer(normalizer, lowercase)

    def split_into_pieces(self, text: str) -> list[str]:
        return self._WORDS.findall(text) if "\x1f" in text else text.split()

    def split_into_words(self, piece: str) -> list[str]:
        return self._WORDS.findall(self._normalised(piece).replace(_SKIPPED_CHARACTER, " "))


def _make_piece_normalizer(normalizer: normalizers.Normalizer, lowercase: bool) -> Callable[[str], str]:
    """Return a faster function that normalizes pieces: of printable ASCII text, a normalizer changes only the case."""

    def normalize_piece(piece: str) -> str:
        if not piece.isascii() or not piece.isprintable():
            return normalizer.normalize_str(piece)
        return piece.lower() if lowercase else piece

    return normalize_piece
