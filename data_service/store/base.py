"""The interface of object stores: keys under one root; objects are read whole or by range, created or replaced.

Local folders and S3 behave alike. A put is atomic: readers see the old bytes or the new ones. A key is a
slash-separated relative path. There are no directories, but a local folder cannot hold both `a` and `a/b`. The same
keys are valid in every store, so that a training run can move from one to another.

Helpers for every store are here, too: concurrent requests (`parallel_map`), the hash of stored bytes (`digest`), and
reads that verify their hash (`read_verified`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

from data_service.store.errors import BadUri

TEMP_PREFIX = ".tmp-"  # names of files still being written start like this; no store lists them
_CONCURRENT_REQUESTS = 32  # requests in flight at the same time: as many connections as a client keeps
T = TypeVar("T")
R = TypeVar("R")
READ_ATTEMPTS = 4  # attempts of `read_verified` to read bytes with the expected digest


def check_key(root: str, key: str) -> str:
    """Return `key` after checking that it is a plain relative path. `root`: URI of the store, for the message.

    Raises:
        BadUri: the key is empty or absolute, or one of its parts is empty, "." or "..", or reserved.
    """
    for part in key.split("/"):
        if part in ("", ".", "..") or "\0" in part or part.startswith(TEMP_PREFIX):
            raise BadUri.for_uri(f"{root}/{key}", f"{part!r} cannot be part of a key")
    return key


def join_path(prefix: str, suffix: str) -> str:
    """Return `prefix` extended by `suffix`. Both are slash-separated paths or ""; slashes around them are ignored."""
    return "/".join(part for part in (prefix.strip("/"), suffix.strip("/")) if part)


@dataclass(frozen=True, slots=True)
class Entry:
    """The entry of one stored object.

    Attributes:
        key: key relative to the store's root.
        size: size in bytes.
        version: text that changes whenever the bytes change, and may change without them. On S3 it is the ETag; for a
            file, the times at which its content and its inode last changed.
    """

    key: str
    size: int
    version: str = field(default="", compare=False)


class Store(Protocol):
    """Objects under a root URI. Every method raises the kinds of `StoreError` in `data_service.store.errors`.

    Concrete stores inherit the methods that have a body here.
    """

    @property
    def uri(self) -> str: ...

    def with_prefix(self, prefix: str) -> "Store":
        """Return a store of the objects below `prefix`, with `prefix` as its root."""
        ...

    def get(self, key: str) -> bytes:
        """Return the whole object. Raises KeyMissing."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return exactly `length` bytes from byte `start`. Raises KeyMissing; Truncated: the object is too short."""
        ...

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Create or replace the object atomically."""
        self.put_buffers(key, [memoryview(data)])

    def put_if_absent(self, key: str, data: bytes | memoryview) -> bool:
        """Create the object atomically. Return False and change nothing if the key exists.

        If several processes try at the same time, one succeeds.
        """
        ...

    def put_buffers(
        self, key: str, buffers: Sequence[memoryview], report_sent: Callable[[int], None] | None = None
    ) -> None:
        """Create or replace atomically an object of any size, whose content is the joined buffers.

        `report_sent` is called with the number of bytes that the store has accepted so far: from any thread, but never
        from two at the same time. The number grows with each call, up to the object's size.
        """
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Upload a local file, in parts if it is large. The object appears only when it is complete."""
        ...

    def size(self, key: str) -> int | None:
        """Return the object's size in bytes; None if it is absent."""
        entry = self.entry(key)
        return None if entry is None else entry.size

    def entry(self, key: str) -> Entry | None:
        """Return the entry of one object, as `list` yields it; None if the object is absent."""
        ...

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yield all objects whose key starts with `prefix` (a string prefix), in key order."""
        ...

    def folders(self) -> Iterator[str]:
        """Yield names of the folders directly below the root, in key order."""
        ...

    def delete(self, key: str) -> None:
        """Delete the object if it exists."""
        ...

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete the objects; ignore keys without an object. On S3 one request deletes up to 1,000 objects."""
        for key in keys:
            self.delete(key)

    def clock(self) -> float | None:
        """Return the store's own time in whole seconds since 1970; None if the store uses this machine's clock."""
        return None

    def age(self, key: str) -> float | None:
        """Return the seconds since the object was written, by the store's own clock alone; None if it is absent.

        The age is never negative. S3 counts whole seconds. No other clock is used, so leases can rely on the age.
        """
        ...

    def remove_leftovers(self, folder: str, *, older_than_key: str | None) -> int:
        """Remove the remains of unfinished writes below `folder` ("" for all); return their number.

        All other methods ignore such remains. `older_than_key`: only remains older than this object are removed
        (none if it is absent), because writers that began later may still run. None removes all remains.
        """
        ...


def parallel_map(request: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Call `request` for each item, up to 32 at the same time; yield the results in the order of the items.

    If `request` raises, its error is raised after the running requests have ended. Closing the iterator early does not
    wait for running requests.
    """
    waiting = iter(items)
    threads = ThreadPoolExecutor(_CONCURRENT_REQUESTS)
    begun: list[Future[R]] = [threads.submit(request, item) for item in islice(waiting, _CONCURRENT_REQUESTS)]
    try:
        while begun:
            yield begun.pop(0).result()
            begun += [threads.submit(request, item) for item in islice(waiting, 1)]
    except GeneratorExit:
        # Garbage collection may close this generator in any thread, even in one that holds a lock of `threading`.
        # `shutdown` takes such a lock and could wait forever. Threads end by themselves once their executor is gone.
        for future in begun:
            future.cancel()
        raise
    except BaseException:
        threads.shutdown(cancel_futures=True)
        raise
    threads.shutdown()


def digest(data: bytes | memoryview) -> str:
    """Return the BLAKE2b hash of 16 bytes, in hexadecimal. Maskfleet hashes all stored data this way."""
    return blake2b(data, digest_size=16).hexdigest()


def chunk_digests(buffers: Iterable[memoryview], chunk_bytes: int) -> tuple[str, ...]:
    """Return the digests of the joined `buffers`, one for every `chunk_bytes` bytes; the last chunk may be shorter."""
    found, current, room = [], blake2b(digest_size=16), chunk_bytes
    for buffer in buffers:
        rest = buffer.cast("B")
        while rest:
            part, rest = rest[:room], rest[room:]
            current.update(part)
            room -= len(part)
            if room == 0:
                found.append(current.hexdigest())
                current, room = blake2b(digest_size=16), chunk_bytes
    return (*found, current.hexdigest()) if room < chunk_bytes else tuple(found)


def read_verified(
    store: Store, key: str, start: int, length: int, expected: str, error_on_mismatch: Exception
) -> bytes:
    """Return `length` bytes of the object from byte `start`, after checking that their digest is `expected`.

    Bytes that do not match are read again, four times in all, because they may have been damaged in transfer.

    Raises:
        `error_on_mismatch`: no attempt read bytes with the digest `expected`.
        StoreError: as `Store.get_range`.
    """
    for _ in range(READ_ATTEMPTS):
        data = store.get_range(key, start, length)
        if digest(data) == expected:
            return data
    raise error_on_mismatch
