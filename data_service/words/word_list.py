"""The longest entries of a list of words, found in text from left to right.

A run of letters of a script with spaces, or of digits, is never cut: `cat` is not found in `cats`. Marks that join the
character before them (vowel signs, accents) are not cut off either.
"""

import re
import unicodedata
from collections.abc import Iterable

from data_service.tokenizers.words import LETTERS_WITHOUT_SPACES

_UNSPACED = "".join(f"{chr(first)}-{chr(last)}" for first, last in LETTERS_WITHOUT_SPACES)
_RUN = re.compile(rf"[^\W_{_UNSPACED}]{{2,}}")


class WordList:
    """Finds words. Immutable, and made once a process."""

    def __init__(self, words: Iterable[str]) -> None:
        self._words = frozenset(words)
        lengths: dict[str, set[int]] = {}
        for word in self._words:
            lengths.setdefault(word[0], set()).add(len(word))
        self._lengths = {first: tuple(sorted(found, reverse=True)) for first, found in lengths.items()}

    def find(self, text: str) -> list[tuple[int, int]]:
        """(start, end) of the entries in `text`, from left to right, at each place the longest that begins there."""
        inside = uncut(text)
        found: list[tuple[int, int]] = []
        at = 0
        while at < len(text):
            stop = 0 if inside[at] else self._longest(text, at, inside)
            if stop:
                found.append((at, stop))
            at = stop or at + 1
        return found

    def _longest(self, text: str, at: int, inside: bytearray) -> int:
        """Where the longest entry that begins at `at` ends; 0 if none does."""
        for length in self._lengths.get(text[at], ()):
            stop = at + length
            if stop <= len(text) and not inside[stop] and text[at:stop] in self._words:
                return stop
        return 0


def uncut(text: str) -> bytearray:
    """[len(text) + 1]: 1 where no word may begin, as it would cut a run of letters, or a mark off its character."""
    inside = bytearray(len(text) + 1)
    for run in _RUN.finditer(text):
        inside[run.start() + 1 : run.end()] = b"\1" * (run.end() - run.start() - 1)
    if not text.isascii():
        for at, character in enumerate(text):
            if at and unicodedata.category(character)[0] == "M" and not text[at - 1].isspace():
                inside[at] = 1
    return inside
