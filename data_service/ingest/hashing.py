"""Documents by the hash of their text: identity for duplicates, and a fair coin for the held-out split
(`data_service.ingest.heldout`)."""

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

BUCKETS = 256

# A document's hash as two big-endian words, its number in its split, and the bytes of its text. 24 bytes, sorted by
# hash in a file.
RECORD = np.dtype([("high", ">u8"), ("low", ">u8"), ("ordinal", "<u4"), ("size", "<u4")])


def hash_text(text: str) -> bytes:
    """blake2b, 16 bytes, of the text as it is: equal hashes are taken for equal documents."""
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def is_blank(text: str) -> bool:
    """Whether a document has nothing in it: such documents are counted, not numbered."""
    return not text or text.isspace()


def sorted_records(digests: bytes | bytearray, sizes: Sequence[int]) -> NDArray[np.void]:
    """Records of the concatenated hashes of a split's documents, in order of hash, then of document."""
    words = np.frombuffer(digests, dtype=">u8").reshape(-1, 2)
    order = np.lexsort((words[:, 1], words[:, 0]))
    records = np.empty(len(words), dtype=RECORD)
    records["high"], records["low"], records["ordinal"] = words[order, 0], words[order, 1], order
    records["size"] = np.asarray(sizes, dtype=np.uint32)[order]
    return records


def bucket_starts(records: NDArray[np.void]) -> list[int]:
    """[BUCKETS + 1]: where the records of each first byte of the hash begin, and the number of records."""
    firsts = np.arange(1, BUCKETS, dtype=np.uint64) << np.uint64(56)
    inner = np.searchsorted(records["high"].astype(np.uint64), firsts)
    return [0, *inner.tolist(), len(records)]
