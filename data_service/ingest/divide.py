"""A pass over a split's documents that are kept, where stretches of them are held out: which stretches there are."""

from collections import Counter
from dataclasses import dataclass

from data_service.ingest.heldout import stretches
from data_service.ingest.receipts import Receipt, write_receipt
from data_service.ingest.write import Kept


@dataclass(frozen=True)
class DivideTask:
    """Split `index` of the input.

    Attributes:
        kept: its documents.
        length: bytes of a stretch on average.
        below: low words from this on are not remembered.
    """

    kept: Kept
    index: int
    length: int
    below: int

    @property
    def receipt(self) -> str:
        return self.kept.layout.receipt("divide", self.index)

    @property
    def input_bytes(self) -> int:
        return self.kept.split.size


class Divided(Receipt):
    """`candidates`: (low word, bytes of the stretches that end with this paragraph), of the words below the bound."""

    candidates: list[tuple[int, int]]


def divide(task: DivideTask) -> Divided:
    """Read the split and find its stretches. Raises as `Kept.read`."""
    sizes: Counter[int] = Counter()
    for text, _ in task.kept.read():
        for stretch, end in stretches(text, task.length):
            if end is not None and end < task.below:
                sizes[end] += len(stretch.encode())
    divided = Divided(files={}, candidates=sorted(sizes.items()))
    write_receipt(task.kept.layout.open(), task.receipt, divided)
    return divided
