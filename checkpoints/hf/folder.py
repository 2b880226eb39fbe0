"""Folders in the transformers format: an export published as a whole, and a folder from anywhere as local files.

An export appears complete or not at all, and replaces nothing but a former export. `maskfleet_export.json` lists what
an export wrote, by SHA-256. It is written first and every config.json last. So no loader takes what an interrupted
export left behind for a model, and the next export knows which files it may remove.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from checkpoints.errors import ExportError
from data_service.formats import foreign_json, is_newer, newer
from data_service.processes import temporary_folder
from data_service.store.base import Store
from data_service.store.errors import StoreError
from data_service.store.local import LocalStore

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
RECORD = "maskfleet_export.json"
PARTS: tuple[Literal["generator"], Literal["discriminator"]] = ("generator", "discriminator")
"""Folders of the networks that were trained as a pair."""
_NAMED = 5  # files that a refusal lists
_ELSEWHERE = "give an empty folder, or delete that one"
_CHUNK = 64 << 20  # bytes held in memory at a time


class ExportRecord(BaseModel):
    """What an export wrote: SHA-256 by key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    files: dict[str, str]


def removable(out: Store) -> list[str]:
    """The keys in `out`, all written by a former export of ours and unchanged since; empty if nothing is there.

    Raises ExportError naming what else is there: it is neither overwritten nor mixed with an export.
    """
    keys = [entry.key for entry in out.list()]
    if not keys:
        return []
    written = _recorded(out) if RECORD in keys else {}
    foreign = [key for key in keys if key != RECORD and not _is_ours(out, key, written)]
    if foreign:
        more = f" and {len(foreign) - _NAMED:,} more" if len(foreign) > _NAMED else ""
        raise ExportError(
            f"{out.uri} holds what no export wrote, or what was changed since: {', '.join(foreign[:_NAMED])}{more}",
            remedy="give an empty folder, or move those files away",
        )
    return keys


def publish(folder: Path, out: Store, former: list[str]) -> None:
    """Put the files of `folder` into `out`, in place of `former`, which `removable` returned.

    What fails on the way leaves nothing behind. Raises StoreError kinds.
    """
    _remove(out, former)
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    record = ExportRecord(files={key: file_digest(path) for key, path in sorted(paths.items())})
    try:
        out.put(RECORD, (record.model_dump_json(indent=1) + "\n").encode())
        for key in sorted(paths, key=_configurations_last):
            out.put_file(key, paths[key])
    except BaseException as error:
        try:
            _remove(out, [*paths, RECORD])
        except StoreError as second:
            error.add_note(f"what was written of the export could not be removed: {second}")
        raise


def _remove(out: Store, keys: list[str]) -> None:
    """The configurations first, so that no loader takes the rest for a model; the record last."""
    for key in sorted(keys, key=lambda key: (key == RECORD, not _configurations_last(key)[0])):
        out.delete(key)


def _configurations_last(key: str) -> tuple[bool, str]:
    return key.rpartition("/")[2] == CONFIG, key


def _recorded(out: Store) -> dict[str, str]:
    data = out.get(RECORD)
    try:
        return ExportRecord.model_validate_json(data).files
    except ValidationError as error:
        if is_newer(data, known=1, error=error):
            raise ExportError(newer(f"{out.uri.rstrip('/')}/{RECORD}"), remedy=_ELSEWHERE) from error
        raise ExportError(
            f"{out.uri.rstrip('/')}/{RECORD} is damaged, so it cannot be told what an export wrote there",
            remedy=_ELSEWHERE,
        ) from error


def _is_ours(out: Store, key: str, written: dict[str, str]) -> bool:
    return key in written and _digest(out, key) == written[key]


def _digest(out: Store, key: str) -> str:
    digest, size = hashlib.sha256(), out.size(key) or 0
    for start in range(0, size, _CHUNK):
        digest.update(out.get_range(key, start, min(_CHUNK, size - start)))
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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


def start_digest(folder: Path) -> str:
    """SHA-256 of the configuration and weights in `folder` and in those of a pair: the same bytes, the same digest."""
    digest = hashlib.sha256()
    for part in (".", *PARTS):
        for name in _names(folder / part):
            path = folder / part / name
            if path.is_file():
                digest.update(f"{part}/{name} {file_digest(path)}\n".encode())
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
