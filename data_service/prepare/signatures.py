"""The MinHash signatures of a chunk, stored as one object for the search for near duplicates.

The object holds one table of records for each band, sorted by the hash of the band, so that a task can read one
range of hashes. Pairs of documents with equal signatures follow, then the weights, lengths of ids and ids of all
documents. Equal signatures share one record per band, so that a million copies of a page cost as much as one page.
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
_NUMBER_DTYPE = np.dtype("<u4")  # type of stored weights, lengths of ids and document numbers


@dataclass(frozen=True)
class ChunkSignatures(StoredRecords):
    """The stored signatures of a chunk: a table for each band, with one record for each distinct signature.

    Attributes:
        documents: number of documents.
        weighted: whether any document represents several input documents (itself and dropped copies).
        id_bytes: number of bytes of all ids together.
    """

    documents: int
    weighted: bool
    id_bytes: int

    def read_copy_pairs(self, store: Store) -> NDArray[np.uint32]:
        """Return [C, 2] pairs of document numbers in the chunk: a document with the signature of an earlier document,
        and the first document with this signature."""
        copies = self.documents - self.records
        start = self._weights_start - 2 * copies * _NUMBER_DTYPE.itemsize
        return self._read_numbers(store, start, 2 * copies).reshape(-1, 2)

    def read_weights(self, store: Store) -> NDArray[np.uint32]:
        """Return [documents]: the number of input documents that each document represents."""
        return self._read_numbers(store, self._weights_start, self.documents)

    def read_ids(self, store: Store, ordinals: list[int]) -> list[str]:
        """Return the ids of the documents with the numbers `ordinals` in the chunk."""
        if not ordinals:
            return []
        start = self._weights_start + self.documents * _NUMBER_DTYPE.itemsize
        ends = np.cumsum(self._read_numbers(store, start, self.documents), dtype=np.int64)
        data = store.get_range(self.key, self.size - self.id_bytes, self.id_bytes)
        return [data[ends[one - 1] if one else 0 : ends[one]].decode() for one in ordinals]

    @property
    def _weights_start(self) -> int:
        """Byte offset of the weights in the object."""
        return self.size - self.id_bytes - 2 * self.documents * _NUMBER_DTYPE.itemsize

    def _read_numbers(self, store: Store, start: int, count: int) -> NDArray[np.uint32]:
        if not count:
            return np.empty(0, dtype=np.uint32)
        return np.frombuffer(store.get_range(self.key, start, count * _NUMBER_DTYPE.itemsize), dtype=_NUMBER_DTYPE)


class SignatureCollector:
    """Collects the signatures of a chunk's documents: 400 bytes of memory per document, 600 during `store`."""

    def __init__(self, words: int, bands: BandSettings) -> None:
        self._words, self._bands = words, bands
        self._keys, self._sketches = bytearray(), bytearray()
        self._first: dict[bytes, int] = {}
        self._weights, self._lengths, self._copies = array("I"), array("I"), array("I")
        self._ids = bytearray()

    def add(self, text: str, document_id: str, weight: int = 1) -> None:
        """Add a document. `weight`: number of input documents that it represents."""
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
        """Store the collected signatures, weights and ids; return their description for the receipt."""
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
