"""Expands the inputs that the user named (files, folders, globs; local or in object stores) to a list of files.

Files that are not text, as those of a tokenizer or a corpus, are left out, and listed with the reason.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from data_service.corpus.manifest import (
    BUILD_FOLDER,
    CONFIGURATION_KEY,
    MANIFEST_KEY,
    MANIFEST_START,
    TOKENIZER_FOLDER,
)
from data_service.errors import InputError
from data_service.ingest.encodings import UTF_8
from data_service.ingest.mds_index import find_unread_files
from data_service.store.base import Entry, Store
from data_service.store.open import open_store
from data_service.tokenizers.files import (
    CONFIG_FILE,
    DEFINITION_FILE,
    MODEL_FILES,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_FILES,
)

UNKNOWN_KIND_REASON = "a file of unknown kind"
_TOKENIZER, _CORPUS, _DESCRIPTION = "a tokenizer's file", "a corpus", "describes a data set"
_OTHER_XML_REASON = (
    "XML, and not named as a dump's pages-articles are: name the file itself to read it as one"
)
_DUMP_INDEX_REASON = "the index of a dump"
_DUMP, _INDEX = re.compile(r"-pages-(articles|meta)"), re.compile(r"-multistream-index\d*\.txt\b")
_NOT_IN_STATE_REASON = "not one of the files that the data set's state.json names"

# A folder with any of these files, or with all files of one set, is a tokenizer's.
_TOKENIZER_FILE_SETS = (
    *({name} for name in (DEFINITION_FILE, CONFIG_FILE, SPECIAL_TOKENS_FILE, *MODEL_FILES)),
    {"vocab.json", "merges.txt"},
    {"vocab.txt", "config.json"},
    {"vocab.txt", "bert_config.json"},
)
# SentencePiece's model files are left out here: they have no known kind, so they are never read.
_TOKENIZER_FILES = {*TOKENIZER_FILES, "config.json", "bert_config.json", "generation_config.json"} - {
    *MODEL_FILES
}
_RECEIPT_KEY_PATTERN = re.compile(
    rf"(.*/|){BUILD_FOLDER}[0-9a-f]{{16}}/receipts/"
)  # keys of an unfinished build's receipts
_DATASET_DICT = ("dataset_dict.json", "dataset_infos.json")
PREPARED_DOCUMENTS, STATISTICS, PREPARATION = (
    "documents/",
    "statistics.json",
    f"{BUILD_FOLDER}preparation.json",
)
"""Of an output of `corpus prepare`: its documents, the object that completes it, and the one that says it is begun."""
_UNFINISHED_PREPARATION_REASON = "documents whose preparation is not complete"
_NOT_KEPT_REASON = "dropped documents or statistics of a preparation"
_DATASET_INFO, _STATE = "dataset_info.json", "state.json"
_CACHE, _HIDDEN = "made by `map` or `filter` of the data next to it", "hidden: name it itself to read it"
# Matches a path up to its first hidden folder or file.
HIDDEN_PATH = re.compile(r"(?:[^/]+/)*?(?:\.(?!\.?/)[^/]*|__MACOSX)(?:/|$)")


@dataclass(frozen=True)
class UnreadFile:
    """A file among the inputs that is not read, or a folder of such files, and the reason."""

    uri: str
    reason: str

    def __str__(self) -> str:
        return f"{self.uri} ({self.reason})"


def non_text(store: Store, sizes: Mapping[str, int], *, with_hidden: bool = False) -> dict[str, UnreadFile]:
    """Return the keys that are not text despite their names, with reasons; of corpora and hidden folders one for all.

    `sizes`: bytes of each object, by key. `with_hidden`: whether what is hidden is read.

    Raises:
        InputError: a saved data set cannot be read as it is.
        StoreError: its state.json cannot be read.
    """
    root = store.uri.rstrip("/")
    begins = () if with_hidden else filter(None, map(HIDDEN_PATH.match, sizes))
    left_out = {begin.string: UnreadFile(f"{root}/{begin[0]}", _HIDDEN) for begin in begins}
    sizes = {key: size for key, size in sizes.items() if key not in left_out}
    names = _names_by_folder(sizes)
    corpora = {folder for folder in names if _is_corpus(store, folder, names)}
    corpora |= {match[1] for folder in names if (match := _RECEIPT_KEY_PATTERN.match(folder))}
    prepared = {folder for folder in names if _is_prepared(folder, names)}
    corpora -= prepared
    half = _find_unfinished_preparations(names) - prepared
    corpora |= half
    for folder, found in names.items():
        corpus = next((corpus for corpus in corpora if folder.startswith(corpus)), None)
        if corpus is not None:
            reason = _UNFINISHED_PREPARATION_REASON if corpus in half else _CORPUS
            left_out.update((folder + name, UnreadFile(f"{root}/{corpus}", reason)) for name in found)
            continue
        output = next((one for one in prepared if folder.startswith(one)), None)
        if output is not None and not folder.startswith(output + PREPARED_DOCUMENTS):
            left_out |= {
                folder + name: UnreadFile(f"{root}/{folder}{name}", _NOT_KEPT_REASON) for name in found
            }
            continue
        for name, reason in _skipped_files(store, folder, found, sizes):
            left_out[folder + name] = UnreadFile(f"{root}/{folder}{name}", reason)
    return left_out


def _skipped_files(
    store: Store, folder: str, found: set[str], sizes: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of files in a folder, outside of corpora, that are not read."""
    if any(mark <= found for mark in _TOKENIZER_FILE_SETS):
        yield from ((name, _TOKENIZER) for name in found & _TOKENIZER_FILES)
    yield from ((name, _DESCRIPTION) for name in found.intersection(_DATASET_DICT))
    yield from ((name, _OTHER_XML_REASON) for name in found if _is_other_xml(name))
    yield from ((name, _DUMP_INDEX_REASON) for name in found if _INDEX.search(name))
    yield from _dataset_extras(store, folder, found)
    yield from find_unread_files(store, folder, found, sizes)


def _is_other_xml(name: str) -> bool:
    kind = kind_from_name(name)
    return kind is not None and kind[0] == "mediawiki" and not _DUMP.search(name)


def _names_by_folder(keys: Iterable[str]) -> dict[str, set[str]]:
    """Return the names of the files in each folder, by folder. Folders end in a slash; the root is empty."""
    names: dict[str, set[str]] = {}
    for key in keys:
        folder, slash, name = key.rpartition("/")
        names.setdefault(folder + slash, set()).add(name)
    return names


def _is_corpus(store: Store, folder: str, names: dict[str, set[str]]) -> bool:
    build, _, configuration = CONFIGURATION_KEY.rpartition("/")
    whole = MANIFEST_KEY in names[folder] and f"{folder}{TOKENIZER_FOLDER}/" in names
    if whole and f"{folder}train/" not in names:  # a merged corpus has no shards of its own
        whole = store.get(folder + MANIFEST_KEY).startswith(MANIFEST_START)
    return whole or configuration in names.get(f"{folder}{build}/", ())


def _is_prepared(folder: str, names: dict[str, set[str]]) -> bool:
    return STATISTICS in names[folder] and folder + PREPARED_DOCUMENTS in names


def _find_unfinished_preparations(names: dict[str, set[str]]) -> set[str]:
    """Return the folders, among all that hold files, in which a preparation has begun."""
    build, _, name = PREPARATION.rpartition("/")
    begun = (folder for folder in names if name in names[folder] and f"/{folder}".endswith(f"/{build}/"))
    return {folder.removesuffix(f"{build}/") for folder in begun}


def _dataset_extras(store: Store, folder: str, found: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of files next to a saved data set: descriptions, and caches of `map` and `filter`."""
    arrow = {name for name in found if name.endswith(".arrow")}
    if not arrow:
        return
    if _DATASET_INFO in found:
        yield _DATASET_INFO, _DESCRIPTION
        yield from ((name, _CACHE) for name in arrow if name.startswith("cache-") and _STATE not in found)
    if _STATE in found:
        yield _STATE, _DESCRIPTION
        data = _read_data_files(store, folder + _STATE)
        yield from ((name, _NOT_IN_STATE_REASON) for name in arrow - data)
        if missing := sorted(data - found):
            raise InputError(
                f"{store.uri.rstrip('/')}/{folder}: the data set's file {missing[0]} is missing",
                remedy="copy the folder again, or save the data set again with save_to_disk",
            )


def _read_data_files(store: Store, key: str) -> set[str]:
    place = f"{store.uri.rstrip('/')}/{key}"
    try:
        state = json.loads(store.get(key))
        names = {str(file["filename"]) for file in state["_data_files"]}
        chosen = state.get("_indices_data_files") or state.get("_indices_files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{place} is not the state of a saved data set: {error}", remedy="save it again with save_to_disk"
        ) from error
    if chosen:
        raise InputError(
            f"{place}: the data set is a choice of rows, which is stored in a separate file",
            remedy="load it with `datasets`, call flatten_indices() and save it again",
        )
    return names


Format = Literal["txt", "jsonl", "csv", "tsv", "parquet", "arrow", "warc", "mediawiki", "tar", "mds"]
Compression = Literal["", "gz", "zst", "bz2", "xz"]

_FORMATS: dict[str, Format] = {
    ".txt": "txt",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".warc": "warc",
    ".wet": "warc",
    ".xml": "mediawiki",
    ".tar": "tar",
}
_COMPRESSIONS: dict[str, Compression] = {"": "", ".gz": "gz", ".zst": "zst", ".bz2": "bz2", ".xz": "xz"}
SUFFIXES: dict[str, tuple[Format, Compression]] = {
    ending + packed: (kind, compression)
    for ending, kind in _FORMATS.items()
    for packed, compression in _COMPRESSIONS.items()
} | {
    ".parquet": ("parquet", ""),
    ".arrow": ("arrow", ""),
    ".tgz": ("tar", "gz"),
    ".txz": ("tar", "xz"),
    ".mds": ("mds", ""),
    ".mds.zstd": ("mds", "zst"),
    ".mds.gz": ("mds", "gz"),
    ".mds.bz2": ("mds", "bz2"),
}
KNOWN_KINDS_TEXT = (
    f"{', '.join(_FORMATS)} (all of them also with .gz, .zst, .bz2 or .xz), .parquet, .arrow, .mds"
)
_DUMP_PART_SUFFIX = re.compile(
    r"(?<=\.xml)-p\d+p\d+(?=\.|$)"
)  # "-p1p41242" in pages-articles1.xml-p1p41242.bz2
_WILDCARD = re.compile(r"[*?\[]")
_GLOB_TOKEN = re.compile(r"(\*\*/|\*\*|\*|\?|\[!?[^]]+\])")
_LISTED_NAMES = 10  # files that an error names


@dataclass(frozen=True, slots=True)
class InputFile:
    """An input file. There may be millions of them.

    Attributes:
        root, key: URI of the store, and key in it.
        size: size in bytes, as stored.
        version: text that changes whenever the bytes change (`Entry.version`).
        format, compression: format of the file, and compression.
        encoding: encoding of its text, unless a byte order mark names another. Parquet and Arrow are always UTF-8.
        inside: whether it is not stored by itself, but a member of an archive.
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


@dataclass(frozen=True)
class _PatternMatch:
    """A match of a pattern. `named`: whether the user named exactly this file."""

    store: Store
    entry: Entry
    named: bool
    left_out: UnreadFile | None  # the reason if the file is known not to be text


def list_inputs(patterns: list[str], encoding: str = UTF_8) -> InputListing:
    """Return all files that match the patterns, each once, in the order of the patterns, and of keys within a pattern.

    `encoding`: encoding of their text, as `encoding_name` returns it.

    Raises:
        InputError: there are no patterns, a pattern matches no file, or a named file is of an unknown kind.
        StoreError: a store cannot be listed.
    """
    if not patterns:
        raise InputError(
            "no input given", remedy="name text files, folders or globs, local or in an object store"
        )
    files: dict[str, InputFile] = {}
    left_out: dict[str, UnreadFile] = {}
    for pattern in patterns:
        listing = _list_pattern(pattern, encoding)
        if not listing.files:
            raise _no_files_error(pattern, listing.left_out)
        for file in listing.files:
            files.setdefault(file.uri, file)
        left_out.update((item.uri, item) for item in listing.left_out)
    return InputListing(
        tuple(files.values()), tuple(item for uri, item in left_out.items() if uri not in files)
    )


def _list_pattern(pattern: str, encoding: str) -> InputListing:
    files: list[InputFile] = []
    left_out: list[UnreadFile] = []
    roots: dict[str, str] = {}  # each folder's name, so that its files share one string
    for found in _expand_pattern(pattern):
        key, kind = found.entry.key, kind_from_name(found.entry.key)
        if kind is not None and found.left_out is None:
            entry = found.entry
            root = roots.setdefault(found.store.uri, found.store.uri)
            files.append(InputFile(root, key, entry.size, *kind, entry.version, encoding))
        elif found.named:
            raise InputError(
                f"{pattern}: unknown kind of file", remedy=f"give files of a known kind: {KNOWN_KINDS_TEXT}"
            )
        else:
            uri = f"{found.store.uri.rstrip('/')}/{key}"
            left_out.append(found.left_out or UnreadFile(uri, UNKNOWN_KIND_REASON))
    return InputListing(tuple(files), tuple(dict.fromkeys(left_out)))


def _no_files_error(pattern: str, left_out: tuple[UnreadFile, ...]) -> InputError:
    seen = "".join(f"\n  {item}" for item in left_out[:_LISTED_NAMES])
    more = f"\n  and {len(left_out) - _LISTED_NAMES:,} more" if len(left_out) > _LISTED_NAMES else ""
    return InputError(
        f"{pattern}: no such file, or no text file in it{seen}{more}",
        remedy=f"check the path; files must end in one of {KNOWN_KINDS_TEXT}",
    )


def _expand_pattern(pattern: str) -> Iterator[_PatternMatch]:
    """Yield all files that match `pattern`, with any suffix. Raises InputError: the pattern is not a valid glob."""
    parent, name = _split_parent(pattern)
    entry = parent.entry(name) if name and parent is not None else None
    if parent is not None and entry is not None:
        yield _PatternMatch(parent, entry, named=True, left_out=None)
        return
    base, glob = _split_glob(pattern)
    store = open_store(base if base or not glob else "/" if pattern.startswith("/") else ".")
    wildcard = _WILDCARD.search(glob)
    entries = list(store.list(glob[: wildcard.start()] if wildcard else ""))
    hidden = bool(HIDDEN_PATH.match(glob))
    left_out = non_text(store, {entry.key: entry.size for entry in entries}, with_hidden=hidden)
    matches = _glob_regex(glob, pattern) if glob else None
    for entry in entries:
        if matches is None or matches.fullmatch(entry.key):
            yield _PatternMatch(store, entry, named=False, left_out=left_out.get(entry.key))


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
    """Return the store of the folder above `path`, and the last part of the path; None if the path is a bare root."""
    base, slash, name = path.rpartition("/")
    if name in ("", ".", "..") or base.endswith(":/"):
        return None, ""
    return open_store(base or ("/" if slash else ".")), name


def kind_from_name(key: str) -> tuple[Format, Compression] | None:
    """Return format and compression of a file by its name; None if they are not known."""
    lowered = _DUMP_PART_SUFFIX.sub("", key.lower())
    return next((kind for suffix, kind in SUFFIXES.items() if lowered.endswith(suffix)), None)


def _glob_regex(glob: str, pattern: str) -> re.Pattern[str]:
    """Return a regular expression for a glob by the shell's rules.

    `*` and `?` match within a folder, `**/` matches any folders, `[...]` matches one character.
    """
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    regex = "".join(parts.get(token) or _glob_literal(token) for token in _GLOB_TOKEN.split(glob))
    try:
        return re.compile(regex, re.DOTALL)
    except re.error as error:
        raise InputError(
            f"{pattern} is not a valid glob: {error.msg}",
            remedy="write [[] for a bracket that is part of a name",
        ) from error


def _glob_literal(token: str) -> str:
    if not (len(token) > 2 and token[0] == "[" and token[-1] == "]"):
        return re.escape(token)
    negated = token[1] == "!"
    characters = re.sub(r"([\\\[\^&~|])", r"\\\1", token[1 + negated : -1])
    return f"[{'^' if negated else ''}{characters}]"


def refuse_own_output(store: Store, listing: InputListing) -> None:
    """Raise InputError if inputs lie in the output, because a second build would read the files of the first."""
    inside = next(
        (file.uri for file in listing.files if file.uri.startswith(store.uri.rstrip("/") + "/")), None
    )
    if inside is not None:
        raise InputError(
            f"the output {store.uri} holds the input {inside}",
            remedy="write to a folder that holds nothing else",
        )
