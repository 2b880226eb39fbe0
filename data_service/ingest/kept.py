"""The documents of a split that are kept, read again once later copies are known; and the stretches they are divided
into.

The pass that divides documents runs only where stretches are held out, not whole documents (`heldout.py`).
"""

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from data_service.errors import InputError
from data_service.ingest.compare import ORDINAL, Slice
from data_service.ingest.documents import read_documents
from data_service.ingest.hashing import encoded_text, hash_texts, read_bytes
from data_service.ingest.heldout import candidates_below, stretch_length, stretches
from data_service.ingest.records import Text
from data_service.ingest.tasks import SplitTask, TaskReceipt, write_receipt
from data_service.store.base import Store


@dataclass(frozen=True)
class Kept:
    """The documents of a split that are no later copies.

    `drops` say which are copies; `digest` is the hash of all hashes of the first pass; `source` covers both.
    """

    drops: tuple[Slice, ...]
    digest: str
    source: str


def read_kept(task: SplitTask, kept: Kept) -> Iterator[tuple[Text, bytes]]:
    """(document, hash) of each document of the task's split that is kept.

    Raises:
        InputError: the text changed since the first pass; else as `read_documents`.
    """
    drops = _read_drops(task.layout.open(), kept.drops)
    seen = hashlib.sha256()
    ordinal = 0
    for document in read_documents(task.split, task.options):
        if document.blank:
            continue
        digest = hash_texts(document.texts)
        seen.update(read_bytes(digest, document.words))
        if ordinal not in drops:
            yield document, digest
        ordinal += 1
    if seen.hexdigest() != kept.digest:
        raise InputError(
            f"{task.split.pieces[0].file.uri} (or one of the {len(task.split.pieces)} inputs read with it) "
            "changed while the corpus was built",
            remedy="run the same command again when the inputs no longer change: it reads what changed again",
        )


def _read_drops(store: Store, slices: tuple[Slice, ...]) -> set[int]:
    """Numbers of the documents that are left out as copies."""
    ordinals = (np.frombuffer(store.get_range(s.key, s.start, s.length), dtype=ORDINAL) for s in slices)
    return {ordinal for part in ordinals for ordinal in part.tolist()}


@dataclass(frozen=True)
class DivideTask(SplitTask):
    """Divide the kept documents of a split.

    Attributes:
        kept: which documents.
        size: bytes of all text, of all splits.
    """

    kept: Kept
    size: int

    @property
    def receipt(self) -> str:
        return self.layout.receipt("divide", self.index)

    @property
    def sources(self) -> tuple[str, ...]:
        return (self.kept.source,)


class Divided(TaskReceipt):
    """`candidates`: (low word, bytes of the stretches that end with this paragraph), of the words below the bound."""

    candidates: list[tuple[int, int]]


def divide(task: DivideTask) -> Divided:
    """Read the split and find its stretches. Raises as `read_kept`."""
    fraction = task.options.heldout_fraction
    length, below = stretch_length(task.size, fraction), candidates_below(task.size, fraction)
    sizes: Counter[int] = Counter()
    for document, _ in read_kept(task, task.kept):
        for stretch, end in stretches(document.text, length):
            if end is not None and end < below:
                sizes[end] += len(encoded_text(stretch).encode())
    divided = Divided(source=task.kept.source, files={}, candidates=sorted(sizes.items()))
    write_receipt(task.layout.open(), task.receipt, divided)
    return divided
