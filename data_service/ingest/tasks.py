"""What every task of a build is: frozen, picklable, and finished once its receipt is there."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

from data_service.ingest.layout import Layout
from data_service.ingest.options import BuildOptions
from data_service.ingest.splits import Piece, Split


class Task(ABC):
    """A piece of work that leaves a receipt under the key `receipt`."""

    @property
    @abstractmethod
    def receipt(self) -> str: ...

    @property
    @abstractmethod
    def input_bytes(self) -> int: ...


@dataclass(frozen=True)
class SplitTask(Task):
    """Work on split `index` of the input."""

    layout: Layout
    index: int
    split: Split
    options: BuildOptions

    @property
    def input_bytes(self) -> int:
        return self.split.size

    def handed(self, piece: Piece) -> Self:
        """The same task with the text of its streamed piece."""
        return replace(self, split=Split((piece,)))
