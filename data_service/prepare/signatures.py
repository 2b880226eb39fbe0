"""The signatures that a chunk leaves for the search for near duplicates, in one object.

It holds one table of records for each band, sorted by the hash of the band, so that a task can read one range of hashes
of one band; then the documents that equal an earlier one of the chunk, then the weights and the ids of all documents.
Documents of equal signatures leave one record a band, so that a million copies of one page weigh as much as one.
"""

from array import array
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_service.ingest.tasks import hash_strings
from data_service.prepare.layout import StoredRecords, bucket_starts
from data_service.prepare.minhash import SKETCH_BYTES, BandSettings, compute_signature
from data_service.store.base import Store, digest

# The hash of a band, the document's number in its chunk, and its sketch.
BAND_RECORD_DTYPE = np.dtype([("key", "<u8"), ("ordinal", "<u4"), ("sketch", "u1", SKETCH_BYTES)])
_NUMBER_DTYPE = np.dtype("<u4")


@dataclass(frozen=True)
class ChunkSignatures(StoredRecords):
    """The stored signatures of a chunk: a table of records for each band, with one record for each different signature.

    Attributes:
        documents: number of documents.
        weighted: whether a document stands for several.
        id_bytes: bytes of the ids.
    """

    documents: int
    weighted: bool
    id_bytes: int

    def read_copy_pairs(self, store: Store) -> NDArray[np.uint32]:
        """Return [C, 2] numbers in the chunk: a document with the signature of an earlier one, and the first
        document with that signature."""
        copies = self.documents - self.records
        start = self._weights_start - 2 * copies * _NUMBER_DTYPE.itemsize
        return self._read_numbers(store, start, 2 * copies).reshape(-1, 2)

    def read_weights(self, store: Store) -> NDArray[np.uint32]:
        """Return [documents] numbers of documents for which each stands."""
        return self._read_numbers(store, self._weights_start, self.documents)

    def read_ids(self, store: Store, ordinals: list[int]) -> list[str]:
        """Return the ids of the documents with these numbers in the chunk."""
        if not ordinals:
            return []
        start = self._weights_start + self.documents * _NUMBER_DTYPE.itemsize
        ends = np.cumsum(self._read_numbers(store, start, self.documents), dtype=np.int64)
        data = store.get_range(self.key, self.size - self.id_bytes, self.id_bytes)
        return [data[ends[one - 1] if one else 0 : ends[one]].decode() for one in ordinals]

    @property
    def _weights_start(self) -> int:
        """Byte at which the weights begin."""
        return self.size - self.id_bytes - 2 * self.documents * _NUMBER_DTYPE.itemsize

    def _read_numbers(self, store: Store, start: int, count: int) -> NDArray[np.uint32]:
        if not count:
            return np.empty(0, dtype=np.uint32)
        return np.frombuffer(store.get_range(self.key, start, count * _NUMBER_DTYPE.itemsize), dtype=_NUMBER_DTYPE)


class SignatureCollector:
    """Collects the signatures of a chunk's documents: 400 bytes of memory a document, and 600 while they are stored."""

    def __init__(self, words: int, bands: BandSettings) -> None:
        self._words, self._bands = words, bands
        self._keys, self._sketches = bytearray(), bytearray()
        self._first: dict[bytes, int] = {}
        self._weights, self._lengths, self._copies = array("I"), array("I"), array("I")
        self._ids = bytearray()

    def add(self, text: str, document_id: str, weight: int = 1) -> None:
        """Add a document."""
        signature, ordinal = compute_signature(text, self._words), len(self._weights)
        first = self._first.setdefault(signature.digest(), ordinal)
        if first == ordinal:
            self._keys += signature.band_keys(self._bands).tobytes()
            self._sketches += signature.sketch().tobytes()
        else:
            self._copies.extend((ordinal, first))
        encoded = document_id.encode()
        self._ids += encoded
        self._lengths.append(len(encoded))
        self._weights.append(min(weight, 0xFFFFFFFF))

    def store(self, store: Store, key: str) -> ChunkSignatures:
        """Store everything; return what the receipt says of it."""
        ordinals = np.fromiter(self._first.values(), dtype=np.uint32, count=len(self._first))
        keys = np.frombuffer(self._keys, dtype=np.uint64).reshape(len(ordinals), self._bands.count)
        sketches = np.frombuffer(self._sketches, dtype=np.uint8).reshape(len(ordinals), SKETCH_BYTES)
        heads, tables = list[bytes](), list[bytes]()
        for band in range(self._bands.count):
            order = np.argsort(keys[:, band], kind="stable")
            records = np.empty(len(order), dtype=BAND_RECORD_DTYPE)
            records["key"], records["ordinal"] = keys[order, band], ordinals[order]
            records["sketch"] = sketches[order]
            heads.append(bucket_starts(keys[order, band]))
            tables.append(records.tobytes())
        weights = np.asarray(self._weights, dtype=_NUMBER_DTYPE)
        numbers = [np.asarray(part, dtype=_NUMBER_DTYPE).tobytes() for part in (self._copies, weights, self._lengths)]
        parts = [part for part in (*heads, *tables, *numbers, bytes(self._ids)) if part]
        documents = len(weights)
        if documents:
            store.put_buffers(key, [memoryview(part) for part in parts])
        return ChunkSignatures(
            key,
            hash_strings([digest(part) for part in parts]),
            sum(map(len, parts)) if documents else 0,
            len(ordinals),
            documents=documents,
            weighted=bool((weights > 1).any()),
            id_bytes=len(self._ids),
        )
