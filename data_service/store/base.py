"""The object store as everything else sees it: keys under one root, read whole or by range, put once or replaced.

Local folders and S3 behave alike: a put is atomic (readers see the old bytes or the new ones), a key is
a slash-separated relative path, and there are no directories (but a folder cannot hold both `a` and `a/b`).
What a key may look like is the same for every store, so that a run can move from one to another.

Here, too, are helpers for every store: many small requests at once (`together`), the digest of everything stored
(`digest`), and reads that check it (`read_verified`).
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeVar

from data_service.store.errors import BadUri

TEMPORARY = ".tmp-"  # names of files still being written start like this; no store lists them
_REQUESTS = 32  # on their way at the same time: as many connections as a client keeps
T = TypeVar("T")
R = TypeVar("R")
ATTEMPTS = 4


def checked(root: str, key: str) -> str:
    """The key, if it is a plain relative path.

    Raises:
        BadUri: it is empty or absolute, or one of its parts is empty, "." or "..", or reserved.
    """
    for part in key.split("/"):
        if part in ("", ".", "..") or "\0" in part or part.startswith(TEMPORARY):
            raise BadUri.at(f"{root}/{key}", f"{part!r} cannot be part of a key")
    return key


def child(prefix: str, more: str) -> str:
    """`prefix` extended by `more`: both "" or slash-separated paths, slashes around them or not."""
    return "/".join(part for part in (prefix.strip("/"), more.strip("/")) if part)


@dataclass(frozen=True)
class Entry:
    """One stored object: its key relative to the store's root, and its size in bytes.

    `version` is another whenever the bytes are, and may be another for the same bytes: S3's ETag, or when a file and
    its entry in the file system were changed last.
    """

    key: str
    size: int
    version: str = field(default="", compare=False)


class Store(Protocol):
    """Objects under a root URI. Every method raises `StoreError` kinds from `data_service.store.errors`."""

    @property
    def uri(self) -> str: ...

    def at(self, prefix: str) -> "Store":
        """The same store rooted at `prefix` below this root."""
        ...

    def get(self, key: str) -> bytes:
        """The whole object. Raises KeyMissing."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly `length` bytes from byte `start`. Raises KeyMissing, or Truncated if it ends before."""
        ...

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Create or replace atomically."""
        ...

    def put_if_absent(self, key: str, data: bytes | memoryview) -> bool:
        """Create atomically; False (and no change) if the key exists. Of any number of racers one wins."""
        ...

    def put_buffers(
        self, key: str, buffers: Sequence[memoryview], sent: Callable[[int], None] | None = None
    ) -> None:
        """Create or replace atomically an object of any size: contiguous buffers laid end to end.

        `sent` is told, from any thread but never from two at once, how many bytes the store has accepted so
        far; more each time, at the end all.
        """
        ...

    def put_file(self, key: str, path: Path) -> None:
        """Upload a local file, in parts where it is large. The object appears only when complete."""
        ...

    def size(self, key: str) -> int | None:
        """Size in bytes, None if absent."""
        ...

    def entry(self, key: str) -> Entry | None:
        """What `list` says of one object, None if absent."""
        ...

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """All objects whose key starts with `prefix` (a string prefix), in key order."""
        ...

    def folders(self) -> Iterator[str]:
        """Names of what lies directly below the root and has objects below it, in key order."""
        ...

    def delete(self, key: str) -> None:
        """Remove; absent is not an error."""
        ...

    def delete_many(self, keys: Sequence[str]) -> None:
        """Remove; absent is not an error. On S3 one request removes a thousand."""
        ...

    def clock(self) -> float | None:
        """Seconds since 1970 by the store's own clock, to the second; None if it goes by ours."""
        ...

    def age(self, key: str) -> float | None:
        """Seconds since the object was written, by the store's own clock alone; None if it is absent.

        Never negative. S3 counts whole seconds. No machine's clock but the store's takes part, so a lease may
        be judged by it.
        """
        ...

    def remove_leftovers(self, folder: str, *, older_than_s: float) -> int:
        """Free what writes below `folder` ("" for all) that never finished still occupy; returns how many.

        Leftovers are invisible to every other method. Those younger than `older_than_s` seconds are kept:
        their writer may be alive.
        """
        ...


def together(request: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """What `request` returns for each item, in their order; so many answers at most are kept for a slow reader.

    Raises:
        whatever `request` raises; requests that have begun are waited for.
    """
    waiting = iter(items)
    with ThreadPoolExecutor(_REQUESTS) as threads:
        begun: list[Future[R]] = [threads.submit(request, item) for item in islice(waiting, _REQUESTS)]
        try:
            while begun:
                yield begun.pop(0).result()
                begun += [threads.submit(request, item) for item in islice(waiting, 1)]
        finally:
            for future in begun:
                future.cancel()


def digest(data: bytes | memoryview) -> str:
    """BLAKE2b of 16 bytes, in hexadecimal: the hash of everything Maskfleet stores."""
    return blake2b(data, digest_size=16).hexdigest()


def chunk_digests(buffers: Iterable[memoryview], chunk: int) -> tuple[str, ...]:
    """The digests of `buffers`, laid end to end and cut every `chunk` bytes; the last piece may be shorter."""
    found, current, room = [], blake2b(digest_size=16), chunk
    for buffer in buffers:
        rest = buffer.cast("B")
        while rest:
            part, rest = rest[:room], rest[room:]
            current.update(part)
            room -= len(part)
            if room == 0:
                found.append(current.hexdigest())
                current, room = blake2b(digest_size=16), chunk
    return (*found, current.hexdigest()) if room < chunk else tuple(found)


def read_verified(
    store: Store, key: str, start: int, length: int, expected: str, otherwise: Exception
) -> bytes:
    """`length` bytes of the object from byte `start`, whose digest is `expected`.

    A mismatch is read again a few times, for damage on the way; damage at rest stays.

    Raises:
        `otherwise`: every attempt read other bytes.
        StoreError: KeyMissing, Truncated and the rest, as `Store.get_range`.
    """
    for _ in range(ATTEMPTS):
        data = store.get_range(key, start, length)
        if digest(data) == expected:
            return data
    raise otherwise
