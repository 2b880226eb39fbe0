"""The store of a merged corpus: keys below `parts/0/` are objects of its first part, a corpus at a URI of its own.

    parts/0/train/000000.tar                    train/000000.tar of part 0
    provenance/parts/0/train/000000.parquet     its sidecar

All other keys (tokenizer, removals) are the merged corpus's own. The parts are read-only.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from data_service.corpus.manifest import CorpusManifest
from data_service.store.base import Entry, Store
from data_service.store.errors import BadUri
from data_service.store.open import open_store

_PART_KEY = re.compile(r"(provenance/)?parts/(\d+)/(.+)", re.DOTALL)


def key_of_part_object(part: int, key: str) -> str:
    """Return the merged corpus's key for the object `key` of part number `part`."""
    return f"parts/{part}/{key}"


def with_parts(store: Store, manifest: CorpusManifest) -> Store:
    """Return `store`, or if the corpus was merged a store that also reads its parts. Raises StoreError: invalid URI."""
    if not manifest.parts:
        return store
    return PartsStore(store, [open_store(part.uri) for part in manifest.parts])


class PartsStore:
    """The `Store` of a merged corpus: its own objects can be written, those of its parts only read."""

    def __init__(self, own: Store, parts: Sequence[Store]) -> None:
        self._own, self._parts = own, tuple(parts)

    @property
    def uri(self) -> str:
        return self._own.uri

    def with_prefix(self, prefix: str) -> Store:
        return self._own.with_prefix(prefix)

    def get(self, key: str) -> bytes:
        store, there = self._locate(key)
        return store.get(there)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        store, there = self._locate(key)
        return store.get_range(there, start, length)

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._own_store(key).put(key, data)

    def put_if_absent(self, key: str, data: bytes | memoryview) -> bool:
        return self._own_store(key).put_if_absent(key, data)

    def put_buffers(self, key: str, buffers: Sequence[memoryview], sent: Callable[[int], None] | None = None) -> None:
        self._own_store(key).put_buffers(key, buffers, sent)

    def put_file(self, key: str, path: Path) -> None:
        self._own_store(key).put_file(key, path)

    def size(self, key: str) -> int | None:
        store, there = self._locate(key)
        return store.size(there)

    def entry(self, key: str) -> Entry | None:
        store, there = self._locate(key)
        return store.entry(there)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        """Yield the merged corpus's own objects, without those of its parts."""
        return self._own.list(prefix)

    def folders(self) -> Iterator[str]:
        return self._own.folders()

    def delete(self, key: str) -> None:
        self._own_store(key).delete(key)

    def delete_many(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._own_store(key)
        self._own.delete_many(keys)

    def clock(self) -> float | None:
        return self._own.clock()

    def age(self, key: str) -> float | None:
        store, there = self._locate(key)
        return store.age(there)

    def remove_leftovers(self, folder: str, *, older_than_key: str | None) -> int:
        return self._own.remove_leftovers(folder, older_than_key=older_than_key)

    def _locate(self, key: str) -> tuple[Store, str]:
        """Return the store that holds the object `key`, and the object's key in that store."""
        found = _PART_KEY.fullmatch(key)
        if found is None or int(found[2]) >= len(self._parts):
            return self._own, key
        return self._parts[int(found[2])], f"{found[1] or ''}{found[3]}"

    def _own_store(self, key: str) -> Store:
        """Return the corpus's own store. Raises BadUri: `key` is an object of a part, which is read-only."""
        store, _ = self._locate(key)
        if store is not self._own:
            raise BadUri.for_uri(f"{self.uri}/{key}", "the parts of a merged corpus are read-only")
        return self._own
