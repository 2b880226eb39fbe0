"""Stores results as small JSON objects with a digest of their content, so that damaged results are never used.

{"digest": "...", "content": {...}}

An object's path is computed from its content, so processes that compute the same result write to the same path. It is
written once, by conditional put. An object at a wrong path is ignored. The results of grids of runs, and of evaluations
of a run's checkpoints, are stored in this way.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TypeVar

from pydantic import ValidationError

from data_service.formats import NEWER_REMEDY, StrictRecord, newer_version_message
from data_service.store.base import READ_ATTEMPTS, Store, digest, parallel_map
from data_service.store.errors import KeyMissing
from launcher.errors import RunError


class Sealed(StrictRecord, ABC):
    """Base of the content of a stored object."""

    @property
    @abstractmethod
    def path(self) -> str:
        """The object's key in its store."""


M = TypeVar("M", bound=Sealed)


class _Stored(StrictRecord):  # the JSON object of the module docstring
    digest: str
    content: dict[str, object]


def hash_json(parts: object) -> str:
    """Return a hash of plain JSON values, as 32 hexadecimal digits."""
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return digest(text.encode())


def sealed_bytes(content: Sealed) -> bytes:
    """Return the bytes to store for `content`. Equal contents have equal bytes."""
    data = content.model_dump_json()
    return f'{{"digest": "{digest(data.encode())}", "content": {data}}}\n'.encode()


def store_sealed(store: Store, content: M) -> M:
    """Store `content` and return it. If an intact object exists at its path, keep and return that one instead.

    Raises StoreError; RunError as `read_sealed`.
    """
    while not store.put_if_absent(content.path, sealed_bytes(content)):
        theirs = read_sealed(store, content.path, type(content))
        if theirs is not None:
            return theirs
        store.delete(content.path)
    return content


def read_sealed(store: Store, path: str, kind: type[M]) -> M | None:
    """Return the object at `path`; None if it is absent, damaged (after repeated reads), or belongs to another path.

    Raises:
        RunError: the object is intact, but a newer version wrote it, and this version cannot parse it.
        StoreError: the store cannot be read.
    """
    for _ in range(READ_ATTEMPTS):
        try:
            data = store.get(path)
        except KeyMissing:
            return None
        found = _parse_sealed(data, kind)
        if found is not None:
            return found if found.path == path else None
    if _digest_matches(data):
        raise RunError(newer_version_message(f"{store.uri.rstrip('/')}/{path}"), remedy=NEWER_REMEDY)
    return None


def read_all_sealed(store: Store, paths: Iterable[str], kind: type[M]) -> list[M]:
    """Return the intact objects at `paths`, in order (`read_sealed`). Raises as `read_sealed`."""
    objects = parallel_map(lambda path: read_sealed(store, path, kind), paths)
    return [found for found in objects if found is not None]


def _digest_matches(data: bytes) -> bool:
    """Return whether the digest in `data` matches the bytes of the content, without parsing them."""
    head, separator, rest = data.partition(b'", "content": ')
    content = rest.removesuffix(b"}\n")
    return bool(separator) and head == b'{"digest": "' + digest(content).encode() and content != rest


def _parse_sealed(data: bytes, kind: type[M]) -> M | None:
    try:
        stored = _Stored.model_validate_json(data)
        found = kind.model_validate(stored.content)
    except ValidationError:
        return None
    return found if digest(found.model_dump_json().encode()) == stored.digest else None
