"""First pass over a split: hashes every document, so that copies can be found without holding the corpus in memory."""

import hashlib
from array import array

from data_service.ingest.documents import read_records
from data_service.ingest.encodings import is_odd
from data_service.ingest.hashing import (
    BUCKETS,
    bucket_starts,
    hash_of,
    hash_texts,
    read_bytes,
    sorted_records,
)
from data_service.ingest.records import LISTED, BadRecord, SkippedRecord, skipped_record
from data_service.ingest.tasks import SplitTask, TaskReceipt, write_receipt

_SKIPPED = "+skipped"


class ScanTask(SplitTask):
    """Hash the documents of a split."""

    @property
    def receipt(self) -> str:
        return self.layout.receipt("scan", self.index)

    @property
    def source(self) -> str:
        """Hash of the versions of the files, and of the bounds of a streamed piece, which depend on its decompressed
        size.
        """
        bounds = [f"{p.start} {p.stop} {p.plain_size}" for p in self.split.pieces if p.plain_size]
        return hash_of([*(f"{p.file.version} {p.file.uri}" for p in self.split.pieces), *bounds])

    @property
    def sources(self) -> tuple[str, ...]:
        """If bad records are to be refused, a scan that skipped some does not count."""
        refused = self.options.on_bad_records == "error"
        return (self.source,) if refused else (self.source, self.source + _SKIPPED)


class Scanned(TaskReceipt):
    """What was found in a split.

    Attributes:
        documents: documents with text in them; they are numbered from 0 in reading order.
        empty: documents without.
        skipped: bad records.
        first_skipped: the first `LISTED` of them.
        replaced: documents in which U+FFFD stands for bad bytes.
        odd: documents that look like no text (`is_odd`).
        buckets: [BUCKETS + 1], where each first byte of the hash begins in the sorted hashes.
        digest: hash of all hashes in reading order, and of the words that the input holds. The second pass compares it,
        to be sure that it reads the same text.
    """

    documents: int
    empty: int
    skipped: int
    first_skipped: list[SkippedRecord]
    replaced: int
    odd: int = 0
    buckets: list[int]
    digest: str


def scan(task: ScanTask) -> Scanned:
    """Read the split and write the hashes of its documents. Memory: 20 bytes a document.

    Raises:
        InputError, StoreError: as `read_records`.
    """
    # Hash every document, and count those without text and bad records.
    store = task.layout.open()
    hashes, seen = bytearray(), hashlib.sha256()
    sizes = array("I")
    first_skipped: list[SkippedRecord] = []
    empty = replaced = skipped = odd = 0
    for document in read_records(task.split, task.options):
        if isinstance(document, BadRecord):
            skipped += 1
            if len(first_skipped) < LISTED:
                first_skipped.append(skipped_record(document))
            continue
        if document.blank:
            empty += 1
            continue
        replaced += document.replaced
        odd += any(map(is_odd, document.texts))
        digest = hash_texts(document.texts)
        hashes += digest
        seen.update(read_bytes(digest, document.words))
        sizes.append(document.size)
    # Store the hashes in order, with the places where each first byte begins.
    records = sorted_records(hashes, sizes)
    files: dict[str, int] = {}
    buckets = [0] * (BUCKETS + 1)
    if len(records):
        key = task.layout.hashes(task.index)
        store.put(key, records.tobytes())
        files[key] = records.nbytes
        buckets = bucket_starts(records)
    scanned = Scanned(
        source=task.source + (_SKIPPED if skipped else ""),
        files=files,
        documents=len(records),
        empty=empty,
        skipped=skipped,
        first_skipped=first_skipped,
        replaced=replaced,
        odd=odd,
        buckets=buckets,
        digest=seen.hexdigest(),
    )
    write_receipt(store, task.receipt, scanned)
    return scanned
