"""Paragraphs, or lines, that return in many documents: hashed chunk by chunk, and cut from the documents.

Two paragraphs are the same if their letters and digits are: case, accents, punctuation and white space make no
difference. Each chunk leaves the different hashes of its paragraphs, sorted, each with the number of its documents that
have it (`frequent_paragraphs.py` adds them up). Source of the idea: Wenzek et al. 2020, *CCNet*, section 3.1; there a
paragraph is cut from its second occurrence on, here everywhere, once more than a given number of documents have it.
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

PARAGRAPH_RECORD_DTYPE = np.dtype([("key", "<u8"), ("documents", "<u4")])
_BLANK_LINES = re.compile(r"(\n(?:[^\S\n]*\n)+)")
MAX_SHOWN_CHARACTERS = 200  # characters of a paragraph that the table shows


class DuplicateParagraphs(StrictRecord):
    """Cuts lines or paragraphs that more than a number of documents have, over all inputs.

    Attributes:
        unit: `line`, or `paragraph`: what is between blank lines.
        most_documents: number of documents that may have the same one; in more it is cut from all.
        least_characters: letters and digits of the shortest one that is cut.
        least_words: a document from which something was cut is dropped if fewer words are left.
        listed: number of the most frequent ones that are listed in a table, with their documents.
    """

    stage: Literal["duplicate_paragraphs"]
    unit: Literal["line", "paragraph"] = "line"
    most_documents: int = Field(default=100, ge=1, le=2**31)
    least_characters: int = Field(default=10, ge=1)
    least_words: NonNegativeInt = 5
    listed: int = Field(default=1000, ge=0, le=100_000)

    def split_pieces(self, text: str) -> list[tuple[str, str]]:
        """Return (line or paragraph, separator behind it) for all of a text. Joined they are the text."""
        found = text.split("\n") if self.unit == "line" else _BLANK_LINES.split(text)
        if self.unit == "line":
            return [(line, "\n") for line in found[:-1]] + [(found[-1], "")]
        return list(zip(found[::2], [*found[1::2], ""], strict=True))

    def hash_piece(self, piece: str) -> int | None:
        """Return the hash of a line or paragraph, 64 bits; None for one that is too short to be cut."""
        if is_blank(piece):
            return None
        plain = fold_text(piece)
        if len(plain) < self.least_characters:
            return None
        return int.from_bytes(blake2b(plain.encode(), digest_size=8).digest(), "little")


class ParagraphHashCollector:
    """Collects the hashes of a chunk's paragraphs: 8 bytes of memory each, and 40 while they are stored."""

    def __init__(self, stage: DuplicateParagraphs) -> None:
        self._stage = stage
        self._keys = array("Q")

    def add(self, text: str) -> None:
        """Add a document."""
        keys = (self._stage.hash_piece(piece) for piece, _ in self._stage.split_pieces(text))
        self._keys.extend({key for key in keys if key is not None})

    def store(self, store: Store, key: str) -> StoredRecords:
        """Store the sorted records; return what the receipt says of them."""
        keys, counts = np.unique(np.frombuffer(self._keys, dtype=np.uint64), return_counts=True)
        records = np.empty(len(keys), dtype=PARAGRAPH_RECORD_DTYPE)
        records["key"], records["documents"] = keys, counts
        data = bucket_starts(keys) + records.tobytes() if len(keys) else b""
        put_unless_empty(store, key, data)
        return StoredRecords(key, digest(data), len(data), len(keys))


class ListedParagraph(StrictRecord):
    """A paragraph of the table. `paragraph`: its first characters; `documents`: number of documents that had it."""

    paragraph: str
    documents: int


@dataclass(frozen=True)
class ParagraphCuts:
    """The paragraphs to cut from a chunk's documents.

    Attributes:
        stage: the settings.
        slices: (key, start, length) of the objects that hold the hashes of what is cut.
        listed: (hash, number of documents) of the paragraphs of the table that this chunk is the first to have.
        digest: of all partitions.
    """

    stage: DuplicateParagraphs
    slices: tuple[tuple[str, int, int], ...]
    listed: tuple[tuple[int, int], ...]
    digest: str

    def open_cutter(self, store: Store) -> "ParagraphCutter":
        """Return the cutter of these paragraphs, whose hashes are read from the store. Raises StoreError."""
        read = (np.frombuffer(store.get_range(key, start, length), "<u8") for key, start, length in self.slices)
        return ParagraphCutter(self.stage, (key for part in read for key in part.tolist()), dict(self.listed))


class ParagraphCutter:
    """Cuts paragraphs from documents, and remembers the text of those that are listed.

    Attributes:
        listed: paragraphs of the table that were found.
    """

    def __init__(self, stage: DuplicateParagraphs, keys: Iterable[int], listed: dict[int, int]) -> None:
        self._stage, self._keys, self._wanted = stage, frozenset(keys), listed
        self.listed: list[ListedParagraph] = []

    def cut_paragraphs(self, text: str) -> tuple[str, int, int]:
        """Return the text that is left, and the numbers of paragraphs and of characters that were cut."""
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
        """Return whether too little is left of a document."""
        return is_blank(text) or len(text.split()) < self._stage.least_words
