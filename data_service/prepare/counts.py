"""Counts of the documents of a chunk that a pass (`passes.py`) kept, changed and dropped."""

from collections import Counter, defaultdict

from pydantic import BaseModel, ConfigDict


class PassCounts(BaseModel):
    """Counts of a chunk's documents in a pass.

    Attributes:
        entered: number of documents that entered the pass; for the first pass, of input records.
        left: number of documents that left the pass, that is, were kept.
        entered_bytes, left_bytes: bytes of these documents' texts in UTF-8.
        dropped: number of dropped documents, by stage and reason.
        changed: number of documents whose text a stage changed, by stage.
        clustered: number of documents kept as members of clusters of near duplicates, by stage.
        cut: number of documents from which a stage removed a part, by stage and reason.
        paragraphs_cut, characters_cut: numbers of cut frequent paragraphs and of their characters, by stage.
        odd: number of documents read that do not look like text (`is_garbled`).
        languages, licences: number of documents that left the last pass, by value; "" for an unknown value.
        lengths_read, lengths_left: number of documents with text that entered the first pass, and that left the last
            pass, by length: the number of characters, rounded down to a power of two.
    """

    model_config = ConfigDict(extra="forbid")

    entered: int = 0
    left: int = 0
    entered_bytes: int = 0
    left_bytes: int = 0
    dropped: defaultdict[str, Counter[str]] = defaultdict(Counter)
    changed: Counter[str] = Counter()
    clustered: Counter[str] = Counter()
    cut: defaultdict[str, Counter[str]] = defaultdict(Counter)
    paragraphs_cut: Counter[str] = Counter()
    characters_cut: Counter[str] = Counter()
    odd: int = 0
    languages: Counter[str] = Counter()
    licences: Counter[str] = Counter()
    lengths_read: Counter[int] = Counter()
    lengths_left: Counter[int] = Counter()


def count_length(lengths: Counter[int], text: str) -> None:
    """Count a text under its number of characters, rounded down to a power of two."""
    lengths[1 << max(0, len(text).bit_length() - 1)] += 1
