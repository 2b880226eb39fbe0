"""The sections of a document in Markdown or reStructuredText, and its prose without the markup.

What the markup says of the text are the labels of tasks: the heading that a passage stands under, and which words are
code.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from .documents import Document

_MARKDOWN = re.compile(r"^#{1,4} +(?P<title>[^\n]+?) *#*$", re.MULTILINE)
_UNDERLINED = re.compile(
    r"^(?P<title>(?:\d[\d.]* +)?[A-Z][^\n]{2,60})\n(?P<line>[=\-~^\"'#*+])(?P=line){2,}$", re.MULTILINE
)
_FENCED = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"``(.+?)``|:\w+(?::\w+)?:`~?([^`<]+?)(?: <[^`]*)?`|(?<![`\w])`([^`\n]+)`(?![`_])")
_LINK = re.compile(r"\[([^\]]+)\](?:\([^)]*\)|\[[^\]]*\])|`([^`<]+?)\s*(?:<[^`>]*>)?`_{1,2}")
_EMPHASIS = re.compile(r"(?<!\w)(\*{1,2}|__)(?=\S)(.+?)(?<=\S)\1(?!\w)")
_FOOTNOTE = re.compile(r"\s?\[[#\w.-]+\]_|\[\^\w+\]|(?<=\w)_(?=[\s.,;:)]|$)")
_NO_PROSE = re.compile(r"^(\s|[-*+|>:.#=<\[(]|\d+[.)]|- )")
_WORD = re.compile(r"\w+(?:['-]\w+)*|[^\w\s]")
_FEWEST_WORDS, _FEWEST_LETTERS = 12, 0.72  # of a paragraph; share of its characters


@dataclass(frozen=True)
class Piece:
    """Some of a paragraph's text, and whether it is marked up as code."""

    text: str
    code: bool


@dataclass(frozen=True)
class Paragraph:
    """Prose without markup."""

    pieces: tuple[Piece, ...]

    @property
    def text(self) -> str:
        return " ".join("".join(piece.text for piece in self.pieces).split())

    @property
    def words(self) -> list[tuple[str, bool]]:
        """Words and punctuation marks, each with whether it is code."""
        return [(word, piece.code) for piece in self.pieces for word in _WORD.findall(piece.text)]


@dataclass(frozen=True)
class Section:
    """`title` in lower case, without numbers and markup."""

    title: str
    paragraphs: tuple[Paragraph, ...]


def sections(document: Document) -> list[Section]:
    """In order; what comes before the first heading is left out."""
    text = _FENCED.sub("", document.text)
    headings = sorted(
        [*_MARKDOWN.finditer(text), *_UNDERLINED.finditer(text)], key=lambda heading: heading.start()
    )
    starts = [heading.start() for heading in headings]
    return [
        Section(_title(heading["title"]), tuple(_paragraphs(text[heading.end() : end])))
        for heading, end in zip(headings, [*starts[1:], len(text)], strict=False)
    ]


def _title(heading: str) -> str:
    return re.sub(r"^[\d.\s]+|[`*:]", "", heading).strip().lower()


def _paragraphs(text: str) -> Iterator[Paragraph]:
    """Those of prose: no lists, tables, directives, or code."""
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        if _NO_PROSE.match(part):
            continue
        paragraph = Paragraph(tuple(_pieces(part)))
        words = paragraph.text
        letters = sum(character.isalpha() or character == " " for character in words)
        if len(words.split()) >= _FEWEST_WORDS and letters >= _FEWEST_LETTERS * len(words):
            yield paragraph


def _pieces(text: str) -> Iterator[Piece]:
    end = 0
    for found in _CODE.finditer(text):
        yield Piece(_plain(text[end : found.start()]), code=False)
        yield Piece(next(filter(None, found.groups())), code=True)
        end = found.end()
    yield Piece(_plain(text[end:]), code=False)


def _plain(text: str) -> str:
    linked = _LINK.sub(lambda found: found[1] or found[2], text)
    return _FOOTNOTE.sub("", _EMPHASIS.sub(r"\2", linked))
