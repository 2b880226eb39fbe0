# ruff: noqa: RUF001
"""Cuts a document into sentences by rule: fast enough (tens of MB/s) to disappear beside the tokenizer.

A newline is always a boundary. Within a line, a boundary follows `.`, `!`, `?` or an ellipsis with space
behind it, unless a known abbreviation, an initial or a dotted form (`e.g.`, `U.S.`) ends there, or a
lowercase letter follows; and it follows the full-width marks of Chinese and Japanese with or without space.
"""

import re
from collections.abc import Iterator

LONGEST = 8192  # characters; longer runs are cut, so that no piece is too much for the tokenizer at once

_MARKS = ".!?…。！？"
_CLOSERS = "\"'”’»›)\\]}」』）"
_BOUNDARY = re.compile(
    rf"[{_MARKS}](?![{_MARKS}])"
    rf"(?:(?<=[。！？])[{_CLOSERS}]*+(?P<wide>\s*+)|[{_CLOSERS}]*+(?P<space>\s++))(?=\S)"
)
_OPENERS = "\"'“‘«‹([{「『（"
_ABBREVIATIONS = frozenset(
    """
    al approx apr assoc aug ave bros ca cap capt cf ch co col corp dec dept dr ed eds eq est etc feb fig figs
    fr gen gov hon inc jan jr jul jun lt ltd maj messrs mr mrs ms mt nos nov oct p pp prof pt ref refs rep res
    rev sec sen sep sept ser sgt sr st vol vols vs
    """.split()  # noqa: SIM905
)


def split_sentences(text: str) -> list[str]:
    """The sentences of a document with text in it, none of them empty.

    Laid end to end they are the document with every run of white space around a boundary made one space: a
    sentence that is not the first begins with that space, or without where there was none between the two.
    """
    pieces: list[str] = []
    for line in text.split("\n"):
        stripped = line.strip()
        if not stripped:
            continue
        lead = " " if pieces else ""
        start = 0
        for stop, resume in _boundaries(stripped):
            pieces.extend(_bounded(lead + stripped[start:stop]))
            lead = " " if resume > stop else ""
            start = resume
        pieces.extend(_bounded(lead + stripped[start:]))
    return pieces


def _boundaries(line: str) -> Iterator[tuple[int, int]]:
    """(end of a sentence, start of the next)."""
    for match in _BOUNDARY.finditer(line):
        kind = match.lastgroup or ""
        if kind == "wide" or _ends_sentence(line, match.start(), match.end()):
            yield match.start(kind), match.end()


def _ends_sentence(line: str, mark: int, following: int) -> bool:
    """Whether the last of the marks, at `mark`, ends a sentence when the next word begins at `following`."""
    first = line[following]
    if first in _OPENERS and following + 1 < len(line):
        first = line[following + 1]
    if first.islower():
        return False
    if line[mark] != "." or (mark and line[mark - 1] in _MARKS):
        return True
    word = line[max(0, mark - 16) : mark].rpartition(" ")[2].lstrip(_OPENERS)
    return not ("." in word or (len(word) == 1 and word.isupper()) or word.lower() in _ABBREVIATIONS)


def _bounded(sentence: str) -> Iterator[str]:
    """The sentence in pieces of at most `LONGEST` characters, cut before a space where there is one."""
    start = 0
    while len(sentence) - start > LONGEST:
        cut = sentence.rfind(" ", start + 1, start + LONGEST)
        stop = cut if cut > start else start + LONGEST
        yield sentence[start:stop]
        start = stop
    yield sentence[start:]
