"""Files among the inputs that are not text: those of a tokenizer, a corpus, a saved data set. Each is listed with the
reason why it is not read."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from data_service.corpus.manifest import BUILD, CONFIGURATION, MANIFEST, TOKENIZER
from data_service.errors import InputError
from data_service.store.base import Store

UNKNOWN_KIND = "a file of unknown kind"
_TOKENIZER = "a tokenizer's file"
_CORPUS = "a corpus"
_DESCRIPTION = "describes a data set"
_NOT_IN_STATE = "not one of the files that the data set's state.json names"

# Any of these, or all of a row, make a folder a tokenizer's.
_TOKENIZER_MARKS = (
    {"tokenizer.json"},
    {"tokenizer_config.json"},
    {"special_tokens_map.json"},
    {"spiece.model"},
    {"spm.model"},
    {"sentencepiece.bpe.model"},
    {"tokenizer.model"},
    {"vocab.json", "merges.txt"},
    {"vocab.txt", "config.json"},
    {"vocab.txt", "bert_config.json"},
)
_TOKENIZER_FILES = frozenset(
    {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"}
    | {"vocab.txt", "vocab.json", "merges.txt", "config.json", "bert_config.json", "generation_config.json"}
)
_RECEIPTS = re.compile(rf"(.*/|){BUILD}[0-9a-f]{{16}}/receipts/")  # of a corpus that is not complete
_DATASET_DICT = ("dataset_dict.json", "dataset_infos.json")
_DATASET_INFO, _STATE = "dataset_info.json", "state.json"


@dataclass(frozen=True)
class LeftOut:
    """A file among the inputs that is not read, or a folder of such files, and why."""

    uri: str
    reason: str

    def __str__(self) -> str:
        return f"{self.uri} ({self.reason})"


def not_text(store: Store, keys: Sequence[str]) -> dict[str, LeftOut]:
    """The keys below a store's root that are not text, whatever their names say. A corpus is left out as a whole.

    Raises:
        InputError: a saved data set that cannot be read as it is.
        StoreError: its state.json cannot be read.
    """
    root = store.uri.rstrip("/")
    left_out: dict[str, LeftOut] = {}
    names = _by_folder(keys)
    corpora = {folder for folder in names if _is_corpus(folder, names)}
    corpora |= {match[1] for folder in names if (match := _RECEIPTS.match(folder))}
    for folder, found in names.items():
        corpus = next((corpus for corpus in corpora if folder.startswith(corpus)), None)
        if corpus is not None:
            left_out.update((folder + name, LeftOut(f"{root}/{corpus}", _CORPUS)) for name in found)
            continue
        for name, reason in _reasons(store, folder, found):
            left_out[folder + name] = LeftOut(f"{root}/{folder}{name}", reason)
    return left_out


def _reasons(store: Store, folder: str, found: set[str]) -> Iterator[tuple[str, str]]:
    """(name, why it is not read) of files in a folder outside of corpora."""
    if any(mark <= found for mark in _TOKENIZER_MARKS):
        yield from ((name, _TOKENIZER) for name in found & _TOKENIZER_FILES)
    yield from ((name, _DESCRIPTION) for name in found.intersection(_DATASET_DICT))
    yield from _dataset(store, folder, found)


def _by_folder(keys: Sequence[str]) -> dict[str, set[str]]:
    """Names by folder; folders end in a slash, the root is empty."""
    names: dict[str, set[str]] = {}
    for key in keys:
        folder, slash, name = key.rpartition("/")
        names.setdefault(folder + slash, set()).add(name)
    return names


def _is_corpus(folder: str, names: dict[str, set[str]]) -> bool:
    build, _, configuration = CONFIGURATION.rpartition("/")
    whole = MANIFEST in names[folder] and f"{folder}{TOKENIZER}/" in names and f"{folder}train/" in names
    return whole or configuration in names.get(f"{folder}{build}/", ())


def _dataset(store: Store, folder: str, found: set[str]) -> Iterator[tuple[str, str]]:
    """(name, reason) in a folder that Hugging Face's `save_to_disk` wrote: what its state.json does not name.

    Beside the data lie files that `map` and `filter` keep for themselves.
    """
    arrow = {name for name in found if name.endswith(".arrow")}
    if not arrow:
        return
    if _DATASET_INFO in found:
        yield _DATASET_INFO, _DESCRIPTION
    if _STATE in found:
        yield _STATE, _DESCRIPTION
        data = _data_files(store, folder + _STATE)
        yield from ((name, _NOT_IN_STATE) for name in arrow - data)
        if missing := sorted(data - found):
            raise InputError(
                f"{store.uri.rstrip('/')}/{folder}: the data set's file {missing[0]} is missing",
                remedy="copy the folder again, or save the data set again with save_to_disk",
            )


def _data_files(store: Store, key: str) -> set[str]:
    place = f"{store.uri.rstrip('/')}/{key}"
    try:
        state = json.loads(store.get(key))
        names = {str(file["filename"]) for file in state["_data_files"]}
        chosen = state.get("_indices_data_files") or state.get("_indices_files")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(
            f"{place}: not the state of a saved data set: {error}", remedy="save it again with save_to_disk"
        ) from error
    if chosen:
        raise InputError(
            f"{place}: the data set is a choice of rows, kept in a file of its own",
            remedy="load it with `datasets`, call flatten_indices() and save it again",
        )
    return names
