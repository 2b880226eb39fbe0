"""A folder in the transformers format, local or remote, as local files: its configuration and weights only."""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from checkpoints.hf.publish import CONFIG, INDEX, WEIGHTS
from data_service.formats import foreign_json
from data_service.store.base import Store
from data_service.store.local import LocalStore
from data_service.temporary import temporary_folder

PARTS: tuple[Literal["generator"], Literal["discriminator"]] = ("generator", "discriminator")
"""Folders of the networks that were trained as a pair."""

_CHUNK = 64 << 20  # bytes held in memory at a time


@contextmanager
def local_folder(store: Store) -> Iterator[Path]:
    """The folder at the root of `store`, and those of a pair in it; a remote one is copied for as long as needed.

    Missing files are not reported here; the loader says what it misses. Raises StoreError kinds.
    """
    if isinstance(store, LocalStore):
        yield Path(store.root)
        return
    with temporary_folder("start") as name:
        for part in (".", *PARTS):
            _fetch(store if part == "." else store.at(part), Path(name, part))
        yield name


@contextmanager
def local_configs(store: Store) -> Iterator[Path]:
    """`local_folder` without the weights."""
    with temporary_folder("start") as name:
        for part in (".", *PARTS):
            Path(name, part).mkdir(exist_ok=True)
            _copy(store if part == "." else store.at(part), CONFIG, Path(name, part))
        yield name


def folder_digest(folder: Path) -> str:
    """SHA-256 of the configuration and weights in `folder` and in those of a pair: the same bytes, the same digest."""
    digest = hashlib.sha256()
    for part in (".", *PARTS):
        for name in _names(folder / part):
            path = folder / part / name
            if path.is_file():
                with path.open("rb") as file:
                    content = hashlib.file_digest(file, "sha256").hexdigest()
                digest.update(f"{part}/{name} {content}\n".encode())
    return digest.hexdigest()


def _fetch(store: Store, folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for name in (CONFIG, INDEX):
        _copy(store, name, folder)
    for name in _names(folder):
        if not (folder / name).exists():
            _copy(store, name, folder)


def _names(folder: Path) -> list[str]:
    """The files of one network that count. An index that names others than its neighbours is the loader's to refuse."""
    if not (folder / INDEX).is_file():
        return [CONFIG, WEIGHTS]
    try:
        weight_map = foreign_json((folder / INDEX).read_bytes())["weight_map"]
        files = sorted({str(file) for file in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        files = []
    return [CONFIG, INDEX, *(file for file in files if Path(file).name == file)]


def _copy(store: Store, name: str, folder: Path) -> None:
    size = store.size(name)
    if size is None:
        return
    with (folder / name).open("wb") as file:
        for start in range(0, size, _CHUNK):
            file.write(store.get_range(name, start, min(_CHUNK, size - start)))
