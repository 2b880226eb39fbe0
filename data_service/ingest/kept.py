"""A pass over a split's documents that are kept, where stretches of them are held out: which stretches there are."""

from collections import Counter
from dataclasses import dataclass

from data_service.ingest.hashing import encoded_text
from data_service.ingest.heldout import candidates_below, stretch_length, stretches
from data_service.ingest.tasks import Receipt, SplitTask, write_receipt
from data_service.ingest.write import Kept, read_kept


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


class Divided(Receipt):
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
