"""Expands the inputs that the user named (files, folders, globs; local or in object stores) to a list of files.

Files that are not text are left out, and listed with the reason (`file_kinds.py`).
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from data_service.errors import InputError
from data_service.ingest.encodings import UTF_8
from data_service.ingest.file_kinds import (
    HIDDEN_PATH,
    KNOWN_KINDS_TEXT,
    UNKNOWN_KIND_REASON,
    Compression,
    Format,
    UnreadFile,
    find_non_text_files,
    kind_from_name,
)
from data_service.store.base import Entry, Store
from data_service.store.open import open_store

INSTALL_REMEDY = "pip install 'maskfleet[prepare]'"  # installs all of `_PACKAGES`
_PACKAGES: Mapping[Format, Sequence[str]] = {"warc": ("trafilatura", "warcio"), "mediawiki": ("mwparserfromhell",)}
_WILDCARD = re.compile(r"[*?\[]")
_GLOB_TOKEN = re.compile(r"(\*\*/|\*\*|\*|\?|\[!?[^]]+\])")  # a wildcard or a bracket expression
_MAX_LISTED_FILES = 10  # unread files that an error lists


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input file. There may be millions of them.

    Attributes:
        root, key: URI of the store, and key in it.
        size: size in bytes, as stored.
        version: text that changes whenever the bytes change (`Entry.version`).
        format, compression: format of the file, and compression.
        encoding: encoding of its text, unless a byte order mark names another. Parquet and Arrow are always UTF-8.
        inside: whether it is a member of an archive.
    """

    root: str
    key: str
    size: int
    format: Format
    compression: Compression
    version: str = ""
    encoding: str = UTF_8
    inside: bool = False

    @property
    def uri(self) -> str:
        return f"{self.root.rstrip('/')}/{self.key}"


@dataclass(frozen=True)
class InputListing:
    """The files to read, in input order, and the files among the inputs that are not read."""

    files: tuple[InputFile, ...]
    left_out: tuple[UnreadFile, ...]


def list_inputs(patterns: list[str], encoding: str = UTF_8) -> InputListing:
    """Return all files that match the patterns, each once, in the order of the patterns, then of the keys.

    `encoding`: encoding of the files' text, as `python_encoding_name` returns it.

    Raises:
        InputError: there are no patterns, a pattern matches no file, or a named file is of an unknown kind.
        StoreError: a store cannot be listed.
    """
    if not patterns:
        raise InputError("no input given", remedy="name text files, folders or globs, local or in an object store")
    files: dict[str, InputFile] = {}
    left_out: dict[str, UnreadFile] = {}
    for pattern in patterns:
        listing = _list_pattern(pattern, encoding)
        if not listing.files:
            raise _no_files_error(pattern, listing.left_out)
        for file in listing.files:
            files.setdefault(file.uri, file)
        left_out.update((item.uri, item) for item in listing.left_out)
    return InputListing(tuple(files.values()), tuple(item for uri, item in left_out.items() if uri not in files))


def _list_pattern(pattern: str, encoding: str) -> InputListing:
    files: list[InputFile] = []
    left_out: list[UnreadFile] = []
    roots: dict[str, str] = {}  # one string for each folder, which its files share
    for store, entry, unread in _expand_pattern(pattern):
        kind = kind_from_name(entry.key)
        if kind is not None and unread is None:
            root = roots.setdefault(store.uri, store.uri)
            files.append(InputFile(root, entry.key, entry.size, *kind, entry.version, encoding))
        else:
            left_out.append(unread or UnreadFile(f"{store.uri.rstrip('/')}/{entry.key}", UNKNOWN_KIND_REASON))
    return InputListing(tuple(files), tuple(dict.fromkeys(left_out)))


def _no_files_error(pattern: str, left_out: tuple[UnreadFile, ...]) -> InputError:
    seen = "".join(f"\n  {item}" for item in left_out[:_MAX_LISTED_FILES])
    more = f"\n  and {len(left_out) - _MAX_LISTED_FILES:,} more" if len(left_out) > _MAX_LISTED_FILES else ""
    return InputError(
        f"{pattern}: no such file, or no text file in it{seen}{more}",
        remedy=f"check the path; files must end in one of {KNOWN_KINDS_TEXT}",
    )


def _expand_pattern(pattern: str) -> Iterator[tuple[Store, Entry, UnreadFile | None]]:
    """Yield (store, entry, reason) of all files that match `pattern`. Only files known not to be text have a reason.

    Raises:
        InputError: the pattern is not a valid glob, or names a file of an unknown kind.
    """
    parent, name = _split_parent(pattern)
    entry = parent.entry(name) if name and parent is not None else None
    if parent is not None and entry is not None:
        if kind_from_name(name) is None:
            raise InputError(
                f"{pattern}: unknown kind of file", remedy=f"give files of a known kind: {KNOWN_KINDS_TEXT}"
            )
        yield parent, entry, None
        return
    base, glob = _split_glob(pattern)
    store = open_store(base if base or not glob else "/" if pattern.startswith("/") else ".")
    wildcard = _WILDCARD.search(glob)
    entries = list(store.list(glob[: wildcard.start()] if wildcard else ""))
    hidden = bool(HIDDEN_PATH.match(glob))
    left_out = find_non_text_files(store, {entry.key: entry.size for entry in entries}, with_hidden=hidden)
    matches = _glob_regex(glob, pattern) if glob else None
    for entry in entries:
        if matches is None or matches.fullmatch(entry.key):
            yield store, entry, left_out.get(entry.key)


def _split_glob(pattern: str) -> tuple[str, str]:
    """Return (folder, glob below it). The glob is empty if the pattern is a folder.

    A name that exists is not treated as a glob, even if it contains `[`.
    """
    parts = pattern.split("/")
    for index, part in enumerate(parts):
        if _WILDCARD.search(part) and not _is_folder("/".join(parts[: index + 1])):
            return "/".join(parts[:index]), "/".join(parts[index:])
    return pattern, ""


def _is_folder(path: str) -> bool:
    return next(open_store(path).list(), None) is not None


def _split_parent(path: str) -> tuple[Store | None, str]:
    """Return the store of the parent folder of `path`, and the last part of the path; None if `path` is a root."""
    base, slash, name = path.rpartition("/")
    if name in ("", ".", "..") or base.endswith(":/"):
        return None, ""
    return open_store(base or ("/" if slash else ".")), name


def _glob_regex(glob: str, pattern: str) -> re.Pattern[str]:
    """Return a regular expression for a glob by the shell's rules.

    `*` and `?` match within a folder, `**/` matches any folders, `[...]` matches one character.
    """
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    regex = "".join(parts.get(token) or _bracket_or_literal_regex(token) for token in _GLOB_TOKEN.split(glob))
    try:
        return re.compile(regex, re.DOTALL)
    except re.error as error:
        raise InputError(
            f"{pattern} is not a valid glob: {error.msg}",
            remedy="write [[] for a literal [ in a name",
        ) from error


def _bracket_or_literal_regex(token: str) -> str:
    if not (len(token) > 2 and token[0] == "[" and token[-1] == "]"):
        return re.escape(token)
    negated = token[1] == "!"
    characters = re.sub(r"([\\\[\^&~|])", r"\\\1", token[1 + negated : -1])
    return f"[{'^' if negated else ''}{characters}]"


def require_packages(file: InputFile) -> None:
    """Raise InputError if a package that reads the file's format is not installed."""
    try:
        for package in _PACKAGES.get(file.format, ()):
            import_module(package)
    except ImportError as error:
        raise InputError(
            f"{file.uri} needs the package {error.name}, which is not installed", remedy=INSTALL_REMEDY
        ) from error


def refuse_inputs_in_output(store: Store, listing: InputListing) -> None:
    """Raise InputError if inputs lie in the output, because a second build would read the files of the first."""
    inside = next((file.uri for file in listing.files if file.uri.startswith(store.uri.rstrip("/") + "/")), None)
    if inside is not None:
        raise InputError(
            f"the output folder {store.uri} contains the input {inside}",
            remedy="give another folder with --out, which contains nothing else",
        )
