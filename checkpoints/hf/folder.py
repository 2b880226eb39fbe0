"""Folders in the transformers format: publish an export as a whole, and copy a folder from any store to local files.

An export appears complete or not at all, and replaces only an earlier export. `maskfleet_export.json` lists the files
of an export with their SHA-256. It is written first, and every config.json last. So no loader mistakes the files of
an interrupted export for a model, and the next export knows which files it may remove.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from checkpoints.errors import ExportError
from data_service.formats import StrictRecord, is_from_newer_version, newer_version_message, parse_json
from data_service.processes import temporary_folder
from data_service.store.base import Store
from data_service.store.errors import StoreError
from data_service.store.local import LocalStore
from encoder_core.errors import ModelError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"  # names the file of each parameter, if there are several files
PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
GENERATOR_CONFIG, GENERATOR_PICKLE = "generator_config.json", "pytorch_model.generator.bin"
"""Names of a generator's files that lie next to its discriminator's, as DeBERTa v3 is published."""
EXPORT_RECORD = "maskfleet_export.json"  # list of an export's files (`ExportRecord`)
PAIR_FOLDERS: tuple[Literal["generator"], Literal["discriminator"]] = ("generator", "discriminator")
"""Names of the folders of two networks that were trained as a pair."""
_LISTED_FILES = 5  # largest number of files that a message lists
_REMEDY = "export to an empty folder, or delete this one"
_CHUNK_BYTES = 64 << 20  # bytes held in memory at a time


class ExportRecord(StrictRecord):
    """The record of an export. `files`: SHA-256 (hex) of each file that it wrote, by key."""

    format: Literal[1] = 1
    files: dict[str, str]


def replaceable_files(out: Store) -> list[str]:
    """Return all keys in `out` if an earlier export wrote them and they are unchanged; empty if `out` is empty.

    Raises ExportError: `out` holds other files, which the message names. They are neither overwritten nor mixed with an
    export.
    """
    keys = [entry.key for entry in out.list()]
    if not keys:
        return []
    written = _recorded_digests(out) if EXPORT_RECORD in keys else {}
    others = [key for key in keys if key != EXPORT_RECORD]
    foreign = [key for key in others if key not in written or _stored_digest(out, key) != written[key]]
    if foreign:
        more = f" and {len(foreign) - _LISTED_FILES:,} more" if len(foreign) > _LISTED_FILES else ""
        raise ExportError(
            f"{out.uri} holds files that no export wrote, or that were changed since: "
            f"{', '.join(foreign[:_LISTED_FILES])}{more}",
            remedy="export to an empty folder, or move these files away",
        )
    return keys


def publish(folder: Path, out: Store, former_keys: list[str]) -> None:
    """Replace the files `former_keys` in `out`, which `replaceable_files` returned, by the files of `folder`.

    If a write fails, the files written so far are removed. Raises StoreError: the store does not answer or is full.
    """
    _remove_export(out, former_keys)
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    record = ExportRecord(files={key: file_digest(path) for key, path in sorted(paths.items())})
    try:
        out.put(EXPORT_RECORD, (record.model_dump_json(indent=1) + "\n").encode())
        for key in sorted(paths, key=_config_last_order):
            out.put_file(key, paths[key])
        out.remove_leftovers("", older_than_key=EXPORT_RECORD)  # partial files of an export that was killed
    except BaseException as error:
        try:
            _remove_export(out, [*paths, EXPORT_RECORD])
        except StoreError as second:
            error.add_note(f"the files that the failed export had written could not be removed: {second}")
        raise


def _remove_export(out: Store, keys: list[str]) -> None:
    """Delete configurations first, so that no loader mistakes the remaining files for a model, and the record last."""
    for key in sorted(keys, key=lambda key: (key == EXPORT_RECORD, not _config_last_order(key)[0])):
        out.delete(key)


def _config_last_order(key: str) -> tuple[bool, str]:
    return key.rpartition("/")[2] == CONFIG, key


def _recorded_digests(out: Store) -> dict[str, str]:
    data = out.get(EXPORT_RECORD)
    try:
        return ExportRecord.model_validate_json(data).files
    except ValidationError as error:
        if is_from_newer_version(data, known=1, error=error):
            raise ExportError(
                newer_version_message(f"{out.uri.rstrip('/')}/{EXPORT_RECORD}"), remedy=_REMEDY
            ) from error
        raise ExportError(
            f"{out.uri.rstrip('/')}/{EXPORT_RECORD} is damaged, so it is not known which files an export wrote there",
            remedy=_REMEDY,
        ) from error


def _stored_digest(out: Store, key: str) -> str:
    digest, size = hashlib.sha256(), out.size(key) or 0
    for start in range(0, size, _CHUNK_BYTES):
        digest.update(out.get_range(key, start, min(_CHUNK_BYTES, size - start)))
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """Return the SHA-256 (hex) of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pickled_networks(store: Store) -> list[str]:
    """Return the folders in `store` ("." or those of a pair) of networks that have only pickled weights. Raises
    StoreError: the store cannot be read."""
    found = []
    for part in (".", *PAIR_FOLDERS):
        network = store if part == "." else store.with_prefix(part)
        if network.size(CONFIG) is None or any(network.size(name) is not None for name in (WEIGHTS, INDEX)):
            continue
        if any(network.size(name) is not None for name in (PICKLE, PICKLE_INDEX)):
            found.append(part)
    return found


def holds_generator(store: Store) -> bool:
    """Return whether a generator lies next to the network at the root of `store`. Raises StoreError: the store cannot
    be read."""
    return all(store.size(name) is not None for name in (CONFIG, GENERATOR_CONFIG, GENERATOR_PICKLE))


@contextmanager
def local_folder(store: Store) -> Iterator[Path]:
    """Yield a local folder with the model files at the root of `store` and in the folders of a pair.

    A remote folder is copied to a temporary one, which is removed at the end of the block. Missing files are not
    reported here; the loader reports them. Raises StoreError: the store cannot be read.
    """
    if isinstance(store, LocalStore):
        yield Path(store.root)
        return
    with temporary_folder("start") as name:
        for part in (".", *PAIR_FOLDERS):
            copy_network(store if part == "." else store.with_prefix(part), Path(name, part))
        yield name


@contextmanager
def local_configs(store: Store) -> Iterator[Path]:
    """Yield a temporary local folder with the configurations in `store`, as `local_folder` but without weights."""
    with temporary_folder("start") as name:
        for part in (".", *PAIR_FOLDERS):
            Path(name, part).mkdir(exist_ok=True)
            copy_file(store if part == "." else store.with_prefix(part), CONFIG, Path(name, part))
        yield name


@contextmanager
def replace_path_in_errors(folder: Path | str, where: str) -> Iterator[None]:
    """Make ModelErrors that the `with` block raises name the place `where` instead of its local copy in `folder`."""
    try:
        yield
    except ModelError as error:
        problem = error.problem.replace(str(folder), where.rstrip("/"))
        raise ModelError(problem, remedy=error.remedy) from error


def model_digest(folder: Path) -> str:
    """Return a SHA-256 (hex) over the configurations and weights in `folder` and in the folders of a pair in it."""
    digest = hashlib.sha256()
    for part in (".", *PAIR_FOLDERS):
        for name in _network_files(folder / part):
            path = folder / part / name
            if path.is_file():
                digest.update(f"{part}/{name} {file_digest(path)}\n".encode())
    return digest.hexdigest()


def copy_network(store: Store, folder: Path) -> None:
    """Copy the configuration and the safetensors at the root of `store` into the local `folder`, which need not exist.
    Files that `store` lacks are skipped. Raises StoreError: the store cannot be read."""
    folder.mkdir(exist_ok=True)
    for name in (CONFIG, INDEX):
        copy_file(store, name, folder)
    for name in _network_files(folder):
        if not (folder / name).exists():
            copy_file(store, name, folder)


def _network_files(folder: Path) -> list[str]:
    """Return the names of one network's files, without those in an index that lead out of the folder."""
    if not (folder / INDEX).is_file():
        return [CONFIG, WEIGHTS]
    try:
        weight_map = parse_json((folder / INDEX).read_bytes())["weight_map"]
        files = sorted({str(file) for file in weight_map.values()})
    except (ValueError, KeyError, TypeError, AttributeError):
        files = []
    return [CONFIG, INDEX, *(file for file in files if Path(file).name == file)]


def copy_file(store: Store, name: str, folder: Path) -> None:
    """Copy one file of `store` into the local `folder`, under the same name, if `store` has it. Raises StoreError: the
    store cannot be read."""
    size = store.size(name)
    if size is None:
        return
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("wb") as file:
        for start in range(0, size, _CHUNK_BYTES):
            file.write(store.get_range(name, start, min(_CHUNK_BYTES, size - start)))
