"""What every task of a build is: frozen, picklable, and finished once its receipt is there."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import Self

from data_service.corpus.layout import Layout
from data_service.ingest.options import BuildOptions
from data_service.ingest.splits import Piece, Split


class Task(ABC):
    """A piece of work that leaves a receipt under the key `receipt`.

    `sources` are hashes of what it is made from: a receipt is only good if its own is one of them. So what depends on
    an input that changed is done again, and nothing else.
    """

    @property
    @abstractmethod
    def receipt(self) -> str: ...

    @property
    @abstractmethod
    def input_bytes(self) -> int: ...

    @property
    @abstractmethod
    def sources(self) -> tuple[str, ...]: ...


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
