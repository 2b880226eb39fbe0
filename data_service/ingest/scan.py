"""The first pass over a split: hashes every document, so that copies can be found without holding the corpus in memory.

The first half of a hash tells which documents are copies: it covers the text that the tokenizer gets. The second half
decides which documents are held out. It covers only letters and digits, without case and accents: a tokenizer may fold
these and drop spaces, and texts with the same tokens must not be held out and trained on. Letters that the tokenizer
does not know are an exception (`hash_tokens`).
"""

import hashlib
import json
import re
import unicodedata
from array import array
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_service.ingest.documents import read_records
from data_service.ingest.encodings import is_garbled
from data_service.ingest.options import BuildOptions
from data_service.ingest.places import MAX_LISTED_RECORDS, SkippedRecord
from data_service.ingest.records import NOT_CHOSEN_REASON, BadRecord, TextRecord
from data_service.ingest.tasks import SplitTask, TaskReceipt, put_unless_empty
from data_service.store.base import Store
from data_service.types import Tokens

HASH_BUCKETS = 256  # one for each first byte of a hash
DIGEST_BYTES = 16  # bytes of a document's hash

_REPLACED_CHARACTERS = 16  # up to so many distinct non-ASCII characters are folded by one replace() each
_NOT_ALPHANUMERIC = re.compile(r"[\W_]+")
_ASCII = bytes(range(128))
_ASCII_LOWER = bytes(range(256)).lower()
_ASCII_NON_ALPHANUMERIC = bytes(code for code in _ASCII if not chr(code).isalnum())

# A document's hash as two big-endian words, its ordinal in its split, and the bytes of its text: 24 bytes. A file holds
# them sorted by hash.
HASH_RECORD_DTYPE = np.dtype([("high", ">u8"), ("low", ">u8"), ("ordinal", "<u4"), ("size", "<u4")])


def hash_texts(texts: Sequence[str], known_hash: bytes = b"") -> bytes:
    """Return the hash of a document or an example, 16 bytes: blake2b, 8 bytes each, of its text and its `fold_text`.

    Documents with equal hashes count as equal. Documents with the same tokens have equal second halves, unless the
    unknown token is among them. For an example, the first half covers all texts, the second only the query, so that
    all examples of a query are held out, or none.

    `known_hash`: the hash of these texts from an earlier pass. Its second half is used again, because the folding costs
    more than the rest; a changed text still changes the first half.
    """
    return _hash_64_bits(_join_texts(texts)) + (known_hash[8:] or _hash_64_bits(fold_text(texts[0])))


def _join_texts(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else json.dumps(texts)


def _hash_64_bits(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def hash_document(document: TextRecord, options: BuildOptions, known_hash: bytes = b"") -> bytes:
    """Return the hash of a document: `hash_texts` of the text that the tokenizer gets.

    But if the document is in a cluster of near duplicates, the second half is a hash of the cluster's name. So the
    whole cluster is held out, or none of it, and only the first half tells which documents are copies.

    `known_hash`: as in `hash_texts`; only for inputs that name no clusters.
    """
    texts = [options.text_to_encode(text) for text in document.texts]
    if document.cluster_name is not None:
        return _hash_64_bits(_join_texts(texts)) + _hash_64_bits(f"cluster {document.cluster_name}")
    return hash_texts(texts, known_hash)


def bytes_for_split_digest(digest: bytes, document: TextRecord) -> bytes:
    """Return the bytes of a document that a split's digest covers: its hash, and its words and provenance if any."""
    covered = digest
    if document.words:
        covered += hashlib.blake2b(document.words, digest_size=16).digest()
    if document.provenance is not None:
        covered += hashlib.blake2b(json.dumps(document.provenance).encode(), digest_size=16).digest()
    return covered


def hash_id(document: TextRecord, split: int, ordinal: int) -> bytes:
    """Return the hash of a document's id, 16 bytes; for a document without an id, a unique hash."""
    known = document.provenance.id if document.provenance is not None else None
    name = f"id {known}" if known is not None else f"document {split} {ordinal}"
    return hashlib.blake2b(name.encode(), digest_size=16).digest()


def hash_tokens(tokens: Tokens) -> bytes:
    """Return the blake2b hash (16 bytes) of a document's tokens [T]. It does not depend on their dtype."""
    return hashlib.blake2b(tokens.astype("<u4").tobytes(), digest_size=16).digest()


def collapse_spaces(text: str) -> str:
    """Return the text with each run of white space replaced by one space, and without white space at its ends."""
    return " ".join(text.split())


def fold_text(text: str) -> str:
    """Return the letters and digits of a text, with case, accents and Unicode forms folded; if it has none,
    return the text after `collapse_spaces`."""
    plain = text
    if not text.isascii():
        others = set(text.encode().translate(None, _ASCII).decode())
        if len(others) > _REPLACED_CHARACTERS:
            return _fold_characters(text) or collapse_spaces(text)
        for character in others:  # faster than a loop over all characters of the text
            plain = plain.replace(character, _fold_characters(character))
    return plain.encode().translate(_ASCII_LOWER, _ASCII_NON_ALPHANUMERIC).decode() or collapse_spaces(text)


def _fold_characters(text: str) -> str:
    lowered = unicodedata.normalize("NFKD", text).lower().casefold()
    return _NOT_ALPHANUMERIC.sub("", unicodedata.normalize("NFKD", lowered))


def is_blank(text: str) -> bool:
    """Return whether a document's text is empty or white space. Such documents are counted, but not numbered."""
    return not text or text.isspace()


def sort_hash_records(digests: bytes | bytearray, sizes: Sequence[int]) -> NDArray[np.void]:
    """Return the hash records of a split's documents, sorted by hash, then by ordinal. `digests`: joined hashes."""
    words = np.frombuffer(digests, dtype=">u8").reshape(-1, 2)
    order = np.lexsort((words[:, 1], words[:, 0]))
    records = np.empty(len(words), dtype=HASH_RECORD_DTYPE)
    records["high"], records["low"], records["ordinal"] = words[order, 0], words[order, 1], order
    records["size"] = np.asarray(sizes, dtype=np.uint32)[order]
    return records


def digests_in_order(records: NDArray[np.void]) -> bytes:
    """Return the joined hashes of a split's documents in document order: the inverse of `sort_hash_records`."""
    words = np.empty((len(records), 2), dtype=">u8")
    words[records["ordinal"]] = np.stack((records["high"], records["low"]), axis=1)
    return words.tobytes()


def bucket_starts(records: NDArray[np.void]) -> list[int]:
    """Return [HASH_BUCKETS + 1]: the indices at which the sorted records of each first byte begin, and the end."""
    firsts = np.arange(1, HASH_BUCKETS, dtype=np.uint64) << np.uint64(56)
    inner = np.searchsorted(records["high"].astype(np.uint64), firsts)
    return [0, *inner.tolist(), len(records)]


_SKIPPED_SOURCE_SUFFIX = "+skipped"  # ends the source of a receipt whose scan skipped bad records


class ScanTask(SplitTask):
    """The task of hashing the documents of a split."""

    stage: ClassVar[str] = "scan"

    @property
    def accepted_sources(self) -> tuple[str, ...]:
        """See `BuildTask`. If bad records are refused, the receipt of a scan that skipped some does not count."""
        refused = self.options.on_bad_records == "error"
        return (self.source,) if refused else (self.source, self.source + _SKIPPED_SOURCE_SUFFIX)


class ScanReceipt(TaskReceipt):
    """The result of scanning a split.

    Attributes:
        documents: number of documents with text; they are numbered from 0 in reading order.
        empty: number of documents without text.
        not_chosen: number of documents whose licence or source is not chosen.
        skipped: number of bad records.
        first_skipped: the first `MAX_LISTED_RECORDS` bad records.
        replaced: number of documents in which bad bytes were replaced by U+FFFD.
        odd: number of documents that do not look like text (`is_garbled`).
        buckets: `bucket_starts` of the documents' hashes.
        id_buckets: `bucket_starts` of the hashes of the documents' ids; empty without ids.
        digest: hash of `bytes_for_split_digest` of all documents in reading order, by which the second pass checks that
            it reads the same text.
        clusters: the documents' different `DuplicateCluster.found`, sorted; "" for documents of files without clusters.
    """

    documents: int
    empty: int
    not_chosen: int = 0
    skipped: int
    first_skipped: list[SkippedRecord]
    replaced: int
    odd: int = 0
    buckets: list[int]
    id_buckets: list[int] = Field(default_factory=list)
    digest: str
    clusters: list[str] = Field(default_factory=list)


def scan_split(task: ScanTask, store: Store) -> ScanReceipt:
    """Read the split and write the hashes of its documents; return the receipt. Needs 20 bytes of memory per document.

    Raises:
        InputError, StoreError: as in `read_records`.
    """
    # Hash every document, and count those without text and bad records.
    hashes, ids, seen = bytearray(), bytearray(), hashlib.sha256()
    sizes = array("I")
    first_skipped: list[SkippedRecord] = []
    clusters: set[str] = set()
    empty = replaced = skipped = odd = not_chosen = 0
    for document in read_records(task.split, task.options):
        if isinstance(document, BadRecord):
            skipped += 1
            if len(first_skipped) < MAX_LISTED_RECORDS:
                first_skipped.append(document.to_skipped_record())
            continue
        if document.is_blank:
            empty += document.absent != NOT_CHOSEN_REASON
            not_chosen += document.absent == NOT_CHOSEN_REASON
            continue
        replaced += document.replaced
        odd += any(map(is_garbled, document.texts))
        digest = hash_document(document, task.options)
        clusters.add("" if document.cluster is None else document.cluster.found)
        hashes += digest
        seen.update(bytes_for_split_digest(digest, document))
        if task.options.has_ids:
            ids += hash_id(document, task.index, len(sizes))
        sizes.append(document.size)
    # Store the hashes in order, with the places where each first byte begins.
    records = sort_hash_records(hashes, sizes)
    files = put_unless_empty(store, task.layout.document_hashes_key(task.index), records.tobytes())
    id_buckets: list[int] = []
    if task.options.has_ids:
        of_ids = sort_hash_records(ids, sizes)
        files |= put_unless_empty(store, task.layout.document_id_hashes_key(task.index), of_ids.tobytes())
        id_buckets = bucket_starts(of_ids)
    return ScanReceipt(
        source=task.source + (_SKIPPED_SOURCE_SUFFIX if skipped else ""),
        files=files,
        documents=len(records),
        empty=empty,
        not_chosen=not_chosen,
        skipped=skipped,
        first_skipped=first_skipped,
        replaced=replaced,
        odd=odd,
        buckets=bucket_starts(records),
        id_buckets=id_buckets,
        digest=seen.hexdigest(),
        clusters=sorted(clusters),
    )
