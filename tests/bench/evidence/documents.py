"""Free English of a machine as documents: JSON lines, and the text files below folders."""

import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from launcher.errors import OptionError

_TEXT = (".txt", ".md", ".rst")
_RECORDS = ".jsonl"
_NO_PROSE = ("change", "copyright", "licen", "news", "todo", "authors")  # how names of such files begin
_SHORTEST = 400  # characters of a document
_REPEATED = 80  # characters from which a paragraph is one that should not come again; headings do


@dataclass(frozen=True)
class Document:
    """A text and where it is from."""

    name: str
    text: str


def read_documents(paths: Iterable[Path]) -> Iterator[Document]:
    """Documents of `.jsonl` files (an object a line, with `text` and maybe `id`) and of the text files below folders,
    in the order of the paths and of names. `.gz` is read through.

    Files that are no prose by their names, or no UTF-8, and short texts are left out. Raises OptionError: a path that
    is not there, or a line that is no such object.
    """
    for path in paths:
        if not path.exists():
            raise OptionError(f"--text {path}: no such file or folder", remedy="give one that is there")
        files = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in files:
            yield from _of_file(file)


def without_repeats(documents: Iterable[Document]) -> Iterator[Document]:
    """Without the long paragraphs that an earlier document has (licences, navigation), and what is then short."""
    seen: set[bytes] = set()
    for document in documents:
        parts = document.text.split("\n\n")
        kept = [part for part in parts if len(part) < _REPEATED or _is_new(part, seen)]
        text = "\n\n".join(kept)
        if len(text) >= _SHORTEST:
            yield Document(document.name, text)


def _of_file(file: Path) -> Iterator[Document]:
    name = file.name.removesuffix(".gz")
    if name.endswith(_RECORDS) and file.is_file():
        yield from _of_records(file)
    elif name.endswith(_TEXT) and file.is_file() and not name.lower().startswith(_NO_PROSE):
        try:
            yield Document(str(file), _content(file))
        except UnicodeDecodeError:
            return


def _of_records(file: Path) -> Iterator[Document]:
    for number, line in enumerate(_content(file).splitlines(), 1):
        try:
            record = json.loads(line)
            yield Document(str(record.get("id", f"{file.name}:{number}")), str(record["text"]))
        except (ValueError, KeyError, AttributeError) as error:
            raise OptionError(
                f"{file}, line {number}: no object with a field text", remedy="correct the file"
            ) from error


def _content(file: Path) -> str:
    data = file.read_bytes()
    return (gzip.decompress(data) if file.suffix == ".gz" else data).decode()


def _is_new(paragraph: str, seen: set[bytes]) -> bool:
    digest = hashlib.blake2b(" ".join(paragraph.split()).encode(errors="replace"), digest_size=16).digest()
    if digest in seen:
        return False
    seen.add(digest)
    return True
