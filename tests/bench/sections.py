"""Documents of a machine's free English, and the sections of those in Markdown or reStructuredText as plain prose."""

import gzip
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from program import BenchError

_TEXT_NAMES, _RECORDS = (".txt", ".md", ".rst"), ".jsonl"
_NO_PROSE_NAMES = ("change", "copyright", "licen", "news", "todo", "authors")
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
_MIN_WORDS, _MIN_LETTERS = 12, 0.72  # of a paragraph of prose; the latter is a share of its characters


@dataclass(frozen=True)
class Document:
    """A text and where it is from."""

    name: str
    text: str


@dataclass(frozen=True)
class Section:
    """A section of a document: its title in lower case, without numbers and markup, and its paragraphs of prose."""

    title: str
    paragraphs: tuple[str, ...]


def read_documents(paths: Iterable[Path]) -> Iterator[Document]:
    """Yield the documents of `.jsonl` files (an object a line, with `text` and maybe `id`) and of the text files below
    folders, in the order of the paths and of names; `.gz` is read through. Files that are no prose by their names, or
    no UTF-8, are left out.

    Raises BenchError: a path that is not there, or a line that is no such object.
    """
    for path in paths:
        if not path.exists():
            raise BenchError(f"{path}: no such file or folder", remedy="give one that is there")
        for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
            name = file.name.removesuffix(".gz").lower()
            if name.endswith(_RECORDS) and file.is_file():
                yield from _read_records(file)
            elif name.endswith(_TEXT_NAMES) and file.is_file() and not name.startswith(_NO_PROSE_NAMES):
                try:
                    yield Document(str(file), _content(file))
                except UnicodeDecodeError:
                    continue


def _read_records(file: Path) -> Iterator[Document]:
    for number, line in enumerate(_content(file).splitlines(), 1):
        try:
            record = json.loads(line)
            yield Document(str(record.get("id", f"{file.name}:{number}")), str(record["text"]))
        except (ValueError, KeyError, AttributeError) as error:
            problem = f"{file}, line {number}: no object with a field text"
            raise BenchError(problem, remedy="correct the file") from error


def _content(file: Path) -> str:
    data = file.read_bytes()
    return (gzip.decompress(data) if file.suffix == ".gz" else data).decode()


def title_of(document: Document) -> str:
    """Return the title of a proposal: what its header says, or else its name."""
    for line in document.text.splitlines()[:12]:
        if line.startswith("Title:"):
            return line.removeprefix("Title:").strip()
    return " ".join(Path(document.name).stem.split("-")[1:])


def sections(document: Document) -> list[Section]:
    """Return a document's sections in order. What comes before the first heading is left out."""
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


def _paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of prose: no lists, tables, directives, or code."""
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        if _NO_PROSE.match(part):
            continue
        words = " ".join(_plain(part).split())
        letters = sum(character.isalpha() or character == " " for character in words)
        if len(words.split()) >= _MIN_WORDS and letters >= _MIN_LETTERS * len(words):
            yield words


def _plain(text: str) -> str:
    coded = _CODE.sub(lambda found: next(filter(None, found.groups())), text)
    linked = _LINK.sub(lambda found: found[1] or found[2], coded)
    return _FOOTNOTE.sub("", _EMPHASIS.sub(r"\2", linked))
