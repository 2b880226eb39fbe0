"""What became of the documents of a chunk in a pass, in numbers."""

from collections import Counter, defaultdict

from pydantic import BaseModel, ConfigDict


class PassCounts(BaseModel):
    """What became of a chunk's documents in a pass.

    Attributes:
        entered: number of documents that entered the pass; in the first, of records of the input.
        left: number that left it.
        entered_bytes, left_bytes: their text in UTF-8.
        dropped: number by stage and reason.
        changed: number of documents whose text a stage changed, by stage.
        clustered: number of documents that a stage found near duplicates of and kept, by stage.
        cut: number of those of which it removed a part, by stage and reason.
        paragraphs_cut, characters_cut: numbers of paragraphs and of characters that were cut as frequent, by stage.
        odd: number of documents read that do not look like text (`is_garbled`).
        languages, licences: number of documents that left the last pass, by value; "" for none.
        lengths_read, lengths_left: number of documents with text that entered the first pass, and that left the last,
            by their characters: the largest power of two that is not above them.
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
    """Count a text by its length."""
    lengths[1 << max(0, len(text).bit_length() - 1)] += 1
