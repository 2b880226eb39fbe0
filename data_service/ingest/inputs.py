"""From what the user typed (files, folders, globs; local or s3://) to a list of files in a fixed order."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from data_service.errors import InputError
from data_service.store.base import Store
from data_service.store.open import open_store

Format = Literal["txt", "jsonl", "parquet"]
Compression = Literal["", "gz", "zst"]

SUFFIXES: dict[str, tuple[Format, Compression]] = {
    f".{name}{'.' * bool(compression)}{compression}": (name, compression)
    for name in ("txt", "jsonl")
    for compression in ("", "gz", "zst")
} | {".parquet": ("parquet", "")}
_WILDCARD = re.compile(r"[*?\[]")
_GLOB_TOKEN = re.compile(r"(\*\*/|\*\*|\*|\?|\[!?[^]]+\])")


@dataclass(frozen=True)
class InputFile:
    """One object to read: `key` below the store `root`, its size in bytes, and how to read it."""

    root: str
    key: str
    size: int
    format: Format
    compression: Compression

    @property
    def uri(self) -> str:
        return f"{self.root.rstrip('/')}/{self.key}"


@dataclass(frozen=True)
class Listing:
    """Files in input order; `ignored` counts files of the given folders that end in no known suffix."""

    files: tuple[InputFile, ...]
    ignored: int


def list_inputs(patterns: list[str]) -> Listing:
    """Every file the patterns name: in the order of the patterns, by key within one, each file once.

    Raises:
        InputError: nothing asked for, a pattern that matches no file, a named file of unknown kind.
        StoreError: a place that cannot be listed.
    """
    if not patterns:
        raise InputError("no input given", remedy="name text files, folders or globs, local or s3://")
    files: dict[str, InputFile] = {}
    ignored = 0
    for pattern in patterns:
        matched = 0
        for root, key, size, named in _expand(pattern):
            kind = _kind(key)
            if kind is not None:
                file = InputFile(root, key, size, *kind)
                files.setdefault(file.uri, file)
                matched += 1
            elif named:
                raise InputError(
                    f"{pattern}: unknown kind of file", remedy=f"known are {', '.join(SUFFIXES)}"
                )
            else:
                ignored += 1
        if not matched:
            raise InputError(
                f"{pattern}: no such file, or no text file in it",
                remedy=f"check the path; files must end in one of {', '.join(SUFFIXES)}",
            )
    return Listing(tuple(files.values()), ignored)


def _expand(pattern: str) -> Iterator[tuple[str, str, int, bool]]:
    """(root, key, size, named by the user as a file) of all that `pattern` matches, whatever its suffix."""
    parent, name = _parent(pattern)
    size = parent.size(name) if name and parent is not None else None
    if parent is not None and size is not None:
        yield parent.uri, name, size, True
        return
    wildcard = _WILDCARD.search(pattern)
    if wildcard:
        base, slash, literal = pattern[: wildcard.start()].rpartition("/")
        store = open_store(base or ("/" if slash else "."))
        matches = re.compile(_glob_regex(literal + pattern[wildcard.start() :])).fullmatch
        for entry in store.list(literal):
            if matches(entry.key):
                yield store.uri, entry.key, entry.size, False
        return
    store = open_store(pattern)
    for entry in store.list():
        yield store.uri, entry.key, entry.size, False


def _parent(path: str) -> tuple[Store | None, str]:
    """The store of the folder above `path` and the last part; no store where the path is a bare root."""
    base, slash, name = path.rpartition("/")
    if name in ("", ".", "..") or base in ("s3:/", "file:/"):
        return None, ""
    return open_store(base or ("/" if slash else ".")), name


def _kind(key: str) -> tuple[Format, Compression] | None:
    lowered = key.lower()
    return next((kind for suffix, kind in SUFFIXES.items() if lowered.endswith(suffix)), None)


def _glob_regex(glob: str) -> str:
    """Shell rules: `*` and `?` stay within a folder, `**/` crosses folders, `[...]` is one character."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    return "".join(parts.get(token) or _glob_literal(token) for token in _GLOB_TOKEN.split(glob))


def _glob_literal(token: str) -> str:
    is_class = len(token) > 2 and token[0] == "[" and token[-1] == "]"
    return token.replace("[!", "[^", 1) if is_class else re.escape(token)
