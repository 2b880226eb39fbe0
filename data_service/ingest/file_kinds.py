"""Finds the format of a file by its name, and recognises by the files next to it that it is not text, because it
belongs to a tokenizer, a corpus, an unfinished build or a data set."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from data_service.corpus.manifest import BUILD_FOLDER, CONFIGURATION_KEY, MANIFEST_KEY, MANIFEST_START, TOKENIZER_FOLDER
from data_service.errors import InputError
from data_service.ingest.mds_index import find_unread_files
from data_service.store.base import Store
from data_service.tokenizers.files import (
    CONFIG_FILE,
    DEFINITION_FILE,
    SENTENCEPIECE_FILES,
    SPECIAL_TOKENS_FILE,
    TOKENIZER_FILES,
)

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
KNOWN_KINDS_TEXT = f"{', '.join(_FORMATS)} (all of them also with .gz, .zst, .bz2 or .xz), .parquet, .arrow, .mds"
# Page numbers of a partial dump, such as "-p1p41242" in pages-articles1.xml-p1p41242.bz2.
_DUMP_PART_SUFFIX = re.compile(r"(?<=\.xml)-p\d+p\d+(?=\.|$)")

# Reasons why files among the inputs are not read, as messages and manifests show them.
UNKNOWN_KIND_REASON = "a file of unknown kind"
_TOKENIZER_REASON = "a tokenizer's file"
_CORPUS_REASON = "a corpus"
_DESCRIPTION_REASON = "describes a data set"
_NON_DUMP_XML_REASON = "XML without -pages-articles in its name: give its own path to read it as a dump"
_DUMP_INDEX_REASON = "the index of a dump"
_DUMP_NAME_PATTERN = re.compile(r"-pages-(articles|meta)")  # in names of MediaWiki dumps that hold pages
_DUMP_INDEX_PATTERN = re.compile(r"-multistream-index\d*\.txt\b")
_NOT_IN_STATE_REASON = "not one of the files that the data set's state.json names"

# A folder that holds all files of one of these sets is a tokenizer's.
_TOKENIZER_FILE_SETS = (
    *({name} for name in (DEFINITION_FILE, CONFIG_FILE, SPECIAL_TOKENS_FILE, *SENTENCEPIECE_FILES)),
    {"vocab.json", "merges.txt"},
    {"vocab.txt", "config.json"},
    {"vocab.txt", "bert_config.json"},
)
# SentencePiece's model files are not listed: their suffix is unknown, so they are never read anyway.
_TOKENIZER_FILES = {*TOKENIZER_FILES, "config.json", "bert_config.json", "generation_config.json"} - {
    *SENTENCEPIECE_FILES
}
# Matches the keys of an unfinished build's receipts.
_RECEIPT_KEY_PATTERN = re.compile(rf"(.*/|){BUILD_FOLDER}[0-9a-f]{{16}}/receipts/")
_DATASET_DESCRIPTION_FILES = ("dataset_dict.json", "dataset_infos.json")
# Keys in an output of `corpus prepare`: its documents, the object that is written last, and the one written first.
PREPARED_DOCUMENTS_PREFIX = "documents/"
STATISTICS_KEY = "statistics.json"
PREPARATION_KEY = f"{BUILD_FOLDER}preparation.json"
_UNFINISHED_PREPARATION_REASON = "documents whose preparation is not complete"
_BYPRODUCT_REASON = "dropped documents or statistics of a preparation"
_DATASET_INFO_FILE, _STATE_FILE = "dataset_info.json", "state.json"  # written by `save_to_disk` of `datasets`
_CACHE_REASON = "a cache of `map` or `filter`"
_HIDDEN_REASON = "hidden: give its own path to read it"
# Matches a path up to its first hidden folder or file.
HIDDEN_PATH = re.compile(r"(?:[^/]+/)*?(?:\.(?!\.?/)[^/]*|__MACOSX)(?:/|$)")


@dataclass(frozen=True)
class UnreadFile:
    """A file or folder among the inputs that is not read, and the reason."""

    uri: str
    reason: str

    def __str__(self) -> str:
        return f"{self.uri} ({self.reason})"


def find_non_text_files(store: Store, sizes: Mapping[str, int], *, with_hidden: bool = False) -> dict[str, UnreadFile]:
    """Return the files that are not text despite their names, by key. All files of a corpus share one entry.

    `sizes`: bytes of each object, by key. `with_hidden`: whether hidden files are read.

    Raises:
        InputError: a saved data set cannot be read as it is.
        StoreError: its state.json cannot be read.
    """
    root = store.uri.rstrip("/")
    begins = () if with_hidden else filter(None, map(HIDDEN_PATH.match, sizes))
    left_out = {begin.string: UnreadFile(f"{root}/{begin[0]}", _HIDDEN_REASON) for begin in begins}
    sizes = {key: size for key, size in sizes.items() if key not in left_out}
    names = _names_by_folder(sizes)
    corpora = {folder for folder in names if _is_corpus(store, folder, names)}
    corpora |= {match[1] for folder in names if (match := _RECEIPT_KEY_PATTERN.match(folder))}
    prepared = {folder for folder in names if _is_preparation_output(folder, names)}
    corpora -= prepared
    half = _find_unfinished_preparations(names) - prepared
    corpora |= half
    for folder, found in names.items():
        corpus = next((corpus for corpus in corpora if folder.startswith(corpus)), None)
        if corpus is not None:
            reason = _UNFINISHED_PREPARATION_REASON if corpus in half else _CORPUS_REASON
            left_out.update((folder + name, UnreadFile(f"{root}/{corpus}", reason)) for name in found)
            continue
        output = next((one for one in prepared if folder.startswith(one)), None)
        if output is not None and not folder.startswith(output + PREPARED_DOCUMENTS_PREFIX):
            left_out |= {folder + name: UnreadFile(f"{root}/{folder}{name}", _BYPRODUCT_REASON) for name in found}
            continue
        for name, reason in _skipped_files(store, folder, found, sizes):
            left_out[folder + name] = UnreadFile(f"{root}/{folder}{name}", reason)
    return left_out


def _skipped_files(store: Store, folder: str, names: set[str], sizes: Mapping[str, int]) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of the files in a folder that are not read. The folder is not part of a corpus."""
    if any(mark <= names for mark in _TOKENIZER_FILE_SETS):
        yield from ((name, _TOKENIZER_REASON) for name in names & _TOKENIZER_FILES)
    yield from ((name, _DESCRIPTION_REASON) for name in names.intersection(_DATASET_DESCRIPTION_FILES))
    yield from ((name, _NON_DUMP_XML_REASON) for name in names if _is_non_dump_xml(name))
    yield from ((name, _DUMP_INDEX_REASON) for name in names if _DUMP_INDEX_PATTERN.search(name))
    yield from _find_dataset_side_files(store, folder, names)
    yield from find_unread_files(store, folder, names, sizes)


def _is_non_dump_xml(name: str) -> bool:
    kind = kind_from_name(name)
    return kind is not None and kind[0] == "mediawiki" and not _DUMP_NAME_PATTERN.search(name)


def _names_by_folder(keys: Iterable[str]) -> dict[str, set[str]]:
    """Return the names of the files in each folder, by folder. Folders end in a slash; the root is empty."""
    names: dict[str, set[str]] = {}
    for key in keys:
        folder, slash, name = key.rpartition("/")
        names.setdefault(folder + slash, set()).add(name)
    return names


def _is_corpus(store: Store, folder: str, names: dict[str, set[str]]) -> bool:
    """Return whether a folder holds a corpus or an unfinished build of one. `names`: names of files by folder."""
    build, _, configuration = CONFIGURATION_KEY.rpartition("/")
    whole = MANIFEST_KEY in names[folder] and f"{folder}{TOKENIZER_FOLDER}/" in names
    if whole and f"{folder}train/" not in names:  # a merged corpus has no shards of its own
        whole = store.get(folder + MANIFEST_KEY).startswith(MANIFEST_START)
    return whole or configuration in names.get(f"{folder}{build}/", ())


def _is_preparation_output(folder: str, names: dict[str, set[str]]) -> bool:
    return STATISTICS_KEY in names[folder] and folder + PREPARED_DOCUMENTS_PREFIX in names


def _find_unfinished_preparations(names: dict[str, set[str]]) -> set[str]:
    """Return the folders in which `corpus prepare` has begun. `names`: names of files by folder."""
    build, _, name = PREPARATION_KEY.rpartition("/")
    begun = (folder for folder in names if name in names[folder] and f"/{folder}".endswith(f"/{build}/"))
    return {folder.removesuffix(f"{build}/") for folder in begun}


def _find_dataset_side_files(store: Store, folder: str, names: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, reason) of files next to a saved data set: descriptions, and caches of `map` and `filter`."""
    arrow = {name for name in names if name.endswith(".arrow")}
    if not arrow:
        return
    if _DATASET_INFO_FILE in names:
        yield _DATASET_INFO_FILE, _DESCRIPTION_REASON
        yield from ((name, _CACHE_REASON) for name in arrow if name.startswith("cache-") and _STATE_FILE not in names)
    if _STATE_FILE in names:
        yield _STATE_FILE, _DESCRIPTION_REASON
        data = _read_data_file_names(store, folder + _STATE_FILE)
        yield from ((name, _NOT_IN_STATE_REASON) for name in arrow - data)
        if missing := sorted(data - names):
            raise InputError(
                f"{store.uri.rstrip('/')}/{folder}: the data set's file {missing[0]} is missing",
                remedy="copy the folder again, or save the data set again with save_to_disk",
            )


def _read_data_file_names(store: Store, key: str) -> set[str]:
    """Return the names of the .arrow files that hold a saved data set. `key`: key of its state.json."""
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


def kind_from_name(key: str) -> tuple[Format, Compression] | None:
    """Return the format and compression of a file, by its name; None if the suffix is unknown."""
    lowered = _DUMP_PART_SUFFIX.sub("", key.lower())
    return next((kind for suffix, kind in SUFFIXES.items() if lowered.endswith(suffix)), None)
