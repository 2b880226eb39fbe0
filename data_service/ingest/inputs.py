"""From what the user typed (files, folders, globs; local or s3://) to a list of files in a fixed order."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from data_service.errors import InputError
from data_service.ingest.encodings import UTF_8
from data_service.ingest.left_out import UNKNOWN_KIND, LeftOut, not_text
from data_service.store.base import Entry, Store
from data_service.store.open import open_store

Format = Literal["txt", "jsonl", "csv", "tsv", "parquet", "arrow"]
Compression = Literal["", "gz", "zst"]

_LINES: dict[str, Format] = {
    ".txt": "txt",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
}
_COMPRESSIONS: dict[str, Compression] = {"": "", ".gz": "gz", ".zst": "zst"}
SUFFIXES: dict[str, tuple[Format, Compression]] = {
    ending + packed: (kind, compression)
    for ending, kind in _LINES.items()
    for packed, compression in _COMPRESSIONS.items()
} | {".parquet": ("parquet", ""), ".arrow": ("arrow", "")}
KINDS = f"{', '.join(_LINES)} (all of them also with .gz or .zst), .parquet, .arrow"
_WILDCARD = re.compile(r"[*?\[]")
_GLOB_TOKEN = re.compile(r"(\*\*/|\*\*|\*|\?|\[!?[^]]+\])")
_NAMED = 10  # names in a sentence


@dataclass(frozen=True)
class InputFile:
    """One object to read.

    Attributes:
        root, key: where it is: below a store's root.
        size: bytes, as stored.
        version: changes whenever its bytes do (`Entry.version`).
        format, compression: how to read it.
        encoding: of its text, unless a byte order mark says another; Parquet and Arrow are always UTF-8.
    """

    root: str
    key: str
    size: int
    format: Format
    compression: Compression
    version: str = ""
    encoding: str = UTF_8

    @property
    def uri(self) -> str:
        return f"{self.root.rstrip('/')}/{self.key}"


@dataclass(frozen=True)
class InputListing:
    """Files in input order, and files among them that are not read."""

    files: tuple[InputFile, ...]
    left_out: tuple[LeftOut, ...]


@dataclass(frozen=True)
class _Found:
    """A match of a pattern. `named`: the user named this very file."""

    store: Store
    entry: Entry
    named: bool
    left_out: LeftOut | None  # where it is known not to be text


def list_inputs(patterns: list[str], encoding: str = UTF_8) -> InputListing:
    """Every file the patterns name: in the order of the patterns, by key within one, each file once.

    `encoding`: of their text, as `encoding_name` gives it.

    Raises:
        InputError: nothing asked for, a pattern that matches no file, a named file of unknown kind.
        StoreError: a place that cannot be listed.
    """
    if not patterns:
        raise InputError("no input given", remedy="name text files, folders or globs, local or s3://")
    files: dict[str, InputFile] = {}
    left_out: dict[str, LeftOut] = {}
    for pattern in patterns:
        listing = _list_pattern(pattern, encoding)
        if not listing.files:
            raise _nothing(pattern, listing.left_out)
        for file in listing.files:
            files.setdefault(file.uri, file)
        left_out.update((item.uri, item) for item in listing.left_out)
    return InputListing(
        tuple(files.values()), tuple(item for uri, item in left_out.items() if uri not in files)
    )


def _list_pattern(pattern: str, encoding: str) -> InputListing:
    files: list[InputFile] = []
    left_out: list[LeftOut] = []
    for found in _expand(pattern):
        key, kind = found.entry.key, _kind(found.entry.key)
        if kind is not None and found.left_out is None:
            entry = found.entry
            files.append(InputFile(found.store.uri, key, entry.size, *kind, entry.version, encoding))
        elif found.named:
            raise InputError(f"{pattern}: unknown kind of file", remedy=f"known are {KINDS}")
        else:
            uri = f"{found.store.uri.rstrip('/')}/{key}"
            left_out.append(found.left_out or LeftOut(uri, UNKNOWN_KIND))
    return InputListing(tuple(files), tuple(dict.fromkeys(left_out)))


def _nothing(pattern: str, left_out: tuple[LeftOut, ...]) -> InputError:
    seen = "".join(f"\n  {item}" for item in left_out[:_NAMED])
    more = f"\n  and {len(left_out) - _NAMED:,} more" if len(left_out) > _NAMED else ""
    return InputError(
        f"{pattern}: no such file, or no text file in it{seen}{more}",
        remedy=f"check the path; files must end in one of {KINDS}",
    )


def _expand(pattern: str) -> Iterator[_Found]:
    """All that `pattern` matches, whatever its suffix. Raises InputError: a glob that makes no sense."""
    parent, name = _parent(pattern)
    entry = parent.entry(name) if name and parent is not None else None
    if parent is not None and entry is not None:
        yield _Found(parent, entry, named=True, left_out=None)
        return
    base, glob = _split_glob(pattern)
    store = open_store(base if base or not glob else "/" if pattern.startswith("/") else ".")
    wildcard = _WILDCARD.search(glob)
    entries = list(store.list(glob[: wildcard.start()] if wildcard else ""))
    left_out = not_text(store, [entry.key for entry in entries])
    matches = _matcher(glob, pattern) if glob else None
    for entry in entries:
        if matches is None or matches.fullmatch(entry.key):
            yield _Found(store, entry, named=False, left_out=left_out.get(entry.key))


def _split_glob(pattern: str) -> tuple[str, str]:
    """(folder, glob below it); no glob where the pattern is a folder. A name that exists is a name, `[` or not."""
    parts = pattern.split("/")
    for index, part in enumerate(parts):
        if _WILDCARD.search(part) and not _is_folder("/".join(parts[: index + 1])):
            return "/".join(parts[:index]), "/".join(parts[index:])
    return pattern, ""


def _is_folder(path: str) -> bool:
    return next(open_store(path).list(), None) is not None


def _parent(path: str) -> tuple[Store | None, str]:
    """The store of the folder above `path` and the last part; no store where the path is a bare root."""
    base, slash, name = path.rpartition("/")
    if name in ("", ".", "..") or base in ("s3:/", "file:/"):
        return None, ""
    return open_store(base or ("/" if slash else ".")), name


def _kind(key: str) -> tuple[Format, Compression] | None:
    lowered = key.lower()
    return next((kind for suffix, kind in SUFFIXES.items() if lowered.endswith(suffix)), None)


def _matcher(glob: str, pattern: str) -> re.Pattern[str]:
    """Shell rules: `*` and `?` stay within a folder, `**/` crosses folders, `[...]` is one character."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    regex = "".join(parts.get(token) or _glob_literal(token) for token in _GLOB_TOKEN.split(glob))
    try:
        return re.compile(regex, re.DOTALL)
    except re.error as error:
        raise InputError(
            f"{pattern}: not a glob: {error.msg}", remedy="write [[] for a bracket that is part of a name"
        ) from error


def _glob_literal(token: str) -> str:
    if not (len(token) > 2 and token[0] == "[" and token[-1] == "]"):
        return re.escape(token)
    negated = token[1] == "!"
    characters = re.sub(r"([\\\[\^&~|])", r"\\\1", token[1 + negated : -1])
    return f"[{'^' if negated else ''}{characters}]"
