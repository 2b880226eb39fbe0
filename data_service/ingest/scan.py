"""First pass over a split: hash every document, so that copies are found without holding the corpus."""

import hashlib
from array import array

from data_service.ingest.documents import read_documents
from data_service.ingest.hashing import BUCKETS, bucket_starts, hash_text, is_blank, sorted_records
from data_service.ingest.receipts import Receipt, write_receipt
from data_service.ingest.tasks import SplitTask


class ScanTask(SplitTask):
    """Hash the documents of a split."""

    @property
    def receipt(self) -> str:
        return self.layout.receipt("scan", self.index)


class Scanned(Receipt):
    """What was found in a split.

    Attributes:
        documents: documents with text in them; they are numbered from 0 in reading order.
        empty: documents without.
        replaced: documents in which U+FFFD stands for bad bytes.
        buckets: [BUCKETS + 1], where each first byte of the hash begins in the sorted hashes.
        digest: hash of all hashes in reading order; the second pass knows by it that it reads the same text.
    """

    documents: int
    empty: int
    replaced: int
    buckets: list[int]
    digest: str


def scan(task: ScanTask) -> Scanned:
    """Read the split and write the hashes of its documents. Memory: 20 bytes a document.

    Raises:
        InputError, StoreError: as `read_documents`.
    """
    store = task.layout.open()
    hashes = bytearray()
    sizes = array("I")
    empty = replaced = 0
    for document in read_documents(task.split, task.options):
        if is_blank(document.text):
            empty += 1
            continue
        replaced += document.replaced
        hashes += hash_text(document.text)
        sizes.append(len(document.text.encode()))
    records = sorted_records(hashes, sizes)
    files: dict[str, int] = {}
    buckets = [0] * (BUCKETS + 1)
    if len(records):
        key = task.layout.hashes(task.index)
        store.put(key, records.tobytes())
        files[key] = records.nbytes
        buckets = bucket_starts(records)
    scanned = Scanned(
        files=files,
        documents=len(records),
        empty=empty,
        replaced=replaced,
        buckets=buckets,
        digest=hashlib.sha256(hashes).hexdigest(),
    )
    write_receipt(store, task.receipt, scanned)
    return scanned
