"""The object store as everything else sees it: keys under one root, whole or by range, put once or replaced.

Local folders and S3 behave alike: a put is atomic (readers see the old bytes or the new ones), a key is
a slash-separated relative path, and there are no directories (but a folder cannot hold both `a` and `a/b`).
What a key may look like is the same for every store, so that a run can move from one to another.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from data_service.store.errors import BadUri

TEMPORARY = ".tmp-"  # names of files still being written start like this; no store lists them


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
