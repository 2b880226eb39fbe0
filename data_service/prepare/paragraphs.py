"""Hashes the paragraphs (or lines) of each chunk, and cuts paragraphs that many documents share.

Paragraphs are equal if their letters and digits are equal: case, accents, punctuation and white space make no
difference. For each chunk the distinct hashes of its paragraphs are stored, sorted, each with the number of the chunk's
documents that have it (`frequent_paragraphs.py` adds them up). Source of the idea: Wenzek et al. 2020, *CCNet*, section
3.1. CCNet cuts a paragraph from its second occurrence on. Here a paragraph is cut everywhere, if more than a
given number of documents have it.
"""

import re
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import numpy as np
from pydantic import Field, NonNegativeInt

from data_service.formats import StrictRecord
from data_service.ingest.scan import fold_text, is_blank
from data_service.ingest.tasks import put_unless_empty
from data_service.prepare.layout import StoredRecords, bucket_starts
from data_service.store.base import Store, digest

PARAGRAPH_RECORD_DTYPE = np.dtype([("key", "<u8"), ("documents", "<u4")])  # key: hash of a paragraph
_BLANK_LINES = re.compile(r"(\n(?:[^\S\n]*\n)+)")  # the end of a paragraph
MAX_SHOWN_CHARACTERS = 200  # length to which paragraphs in the table are cut


class DuplicateParagraphs(StrictRecord):
    """Cuts lines or paragraphs that are in more than `most_documents` documents of all inputs.

    Attributes:
        unit: `line`, or `paragraph` for text between blank lines.
        most_documents: largest number of documents that may share a line or paragraph; above it, all copies are cut.
        least_characters: letters and digits of the shortest line or paragraph that is cut.
        least_words: a document with cuts is dropped if fewer words remain.
        listed: number of the most frequent lines or paragraphs to list in a table, with their numbers of documents.
    """

    stage: Literal["duplicate_paragraphs"]
    unit: Literal["line", "paragraph"] = "line"
    most_documents: int = Field(default=100, ge=1, le=2**31)
    least_characters: int = Field(default=10, ge=1)
    least_words: NonNegativeInt = 5
    listed: int = Field(default=1000, ge=0, le=100_000)

    def split_pieces(self, text: str) -> list[tuple[str, str]]:
        """Return (line or paragraph, separator after it) for the whole text; joined they give the text."""
        found = text.split("\n") if self.unit == "line" else _BLANK_LINES.split(text)
        if self.unit == "line":
            return [(line, "\n") for line in found[:-1]] + [(found[-1], "")]
        return list(zip(found[::2], [*found[1::2], ""], strict=True))

    def hash_piece(self, piece: str) -> int | None:
        """Return the 64-bit hash of a line or paragraph; None if it is too short to be cut."""
        if is_blank(piece):
            return None
        plain = fold_text(piece)
        if len(plain) < self.least_characters:
            return None
        return int.from_bytes(blake2b(plain.encode(), digest_size=8).digest(), "little")


class ParagraphHashCollector:
    """Collects the hashes of a chunk's paragraphs: 8 bytes of memory for each hash, and 40 during `store`."""

    def __init__(self, stage: DuplicateParagraphs) -> None:
        self._stage = stage
        self._keys = array("Q")

    def add(self, text: str) -> None:
        """Add the text of a document."""
        keys = (self._stage.hash_piece(piece) for piece, _ in self._stage.split_pieces(text))
        self._keys.extend({key for key in keys if key is not None})

    def store(self, store: Store, key: str) -> StoredRecords:
        """Store the sorted records; return their description for the receipt."""
        keys, counts = np.unique(np.frombuffer(self._keys, dtype=np.uint64), return_counts=True)
        records = np.empty(len(keys), dtype=PARAGRAPH_RECORD_DTYPE)
        records["key"], records["documents"] = keys, counts
        data = bucket_starts(keys) + records.tobytes() if len(keys) else b""
        put_unless_empty(store, key, data)
        return StoredRecords(key, digest(data), len(data), len(keys))


class ListedParagraph(StrictRecord):
    """A row of the table of cut paragraphs. `paragraph`: its beginning; `documents`: number of documents with it."""

    paragraph: str
    documents: int


@dataclass(frozen=True)
class ParagraphCuts:
    """The paragraphs to cut from a chunk's documents.

    Attributes:
        stage: the settings.
        slices: (key, start, length) of the stored hashes of these paragraphs.
        listed: (hash, number of documents) of those paragraphs for the table whose first chunk this is.
        digest: hash of the frequent hashes of all chunks and of `listed`.
    """

    stage: DuplicateParagraphs
    slices: tuple[tuple[str, int, int], ...]
    listed: tuple[tuple[int, int], ...]
    digest: str

    def open_cutter(self, store: Store) -> "ParagraphCutter":
        """Read the hashes of these paragraphs from the store; return their cutter. Raises StoreError."""
        read = (np.frombuffer(store.get_range(key, start, length), "<u8") for key, start, length in self.slices)
        return ParagraphCutter(self.stage, (key for part in read for key in part.tolist()), dict(self.listed))


class ParagraphCutter:
    """Cuts frequent paragraphs from documents. `listed`: rows found so far for the table of the most frequent ones."""

    def __init__(self, stage: DuplicateParagraphs, keys: Iterable[int], listed: dict[int, int]) -> None:
        self._stage, self._keys, self._wanted = stage, frozenset(keys), listed
        self.listed: list[ListedParagraph] = []

    def cut_paragraphs(self, text: str) -> tuple[str, int, int]:
        """Return the remaining text, and the numbers of paragraphs and of characters that were cut."""
        kept, paragraphs = list[str](), 0
        for piece, separator in self._stage.split_pieces(text):
            key = self._stage.hash_piece(piece)
            if key is None or key not in self._keys:
                kept.append(piece + separator)
                continue
            paragraphs += 1
            if (documents := self._wanted.pop(key, None)) is not None:
                self.listed.append(ListedParagraph(paragraph=piece.strip()[:MAX_SHOWN_CHARACTERS], documents=documents))
        if not paragraphs:
            return text, 0, 0
        left = "".join(kept).strip("\n")
        return left, paragraphs, len(text) - len(left)

    def is_too_short(self, text: str) -> bool:
        """Return whether the remaining text of a document is blank or has fewer than `least_words` words."""
        return is_blank(text) or len(text.split()) < self._stage.least_words
