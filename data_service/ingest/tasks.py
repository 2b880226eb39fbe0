"""Tasks of a build, and the receipts that they leave.

A task is frozen and picklable, and it is finished once its receipt is there. A receipt is written last. A build that
continues trusts receipts and nothing else.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from data_service.corpus.manifest import BuildLayout
from data_service.ingest.options import BuildOptions
from data_service.ingest.splits import FilePiece, Split
from data_service.store.base import Store, together
from data_service.store.errors import KeyMissing


class BuildTask(ABC):
    """A piece of work that leaves a receipt under the key `receipt`.

    `sources` are hashes of what the task reads. A receipt counts only if its own source is one of them. So if an input
    changes, the tasks that depend on it are done again, and no others.
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
class SplitTask(BuildTask):
    """Work on split `index` of the input."""

    layout: BuildLayout
    index: int
    split: Split
    options: BuildOptions

    @property
    def input_bytes(self) -> int:
        return self.split.size

    def handed(self, piece: FilePiece) -> Self:
        """The same task with the text of its streamed piece."""
        return replace(self, split=Split((piece,)))


class TaskReceipt(BaseModel):
    """What a finished task left.

    Attributes:
        source: hash of what the task read, one of `BuildTask.sources`; otherwise the receipt does not count.
        files: the objects the task wrote, with their sizes in bytes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    files: dict[str, int]


R = TypeVar("R", bound=TaskReceipt)


def write_receipt(store: Store, key: str, receipt: TaskReceipt) -> None:
    """Record that a task is finished. The objects it names must be there already."""
    store.put(key, receipt.model_dump_json().encode())


def find_receipts(store: Store, tasks: Sequence[BuildTask], kind: type[R]) -> list[R | None]:
    """For each task its receipt, or None if it must be done again.

    A receipt counts if its source is one of the task's, and all objects that it names exist with their sizes.
    """
    written = _sizes(store, [task.receipt for task in tasks])

    def read(task: BuildTask) -> R | None:
        found = _read(store, task.receipt, kind) if task.receipt in written else None
        return found if found is not None and found.source in task.sources else None

    receipts = list(together(read, tasks))
    stored = _sizes(store, [name for receipt in receipts if receipt for name in receipt.files])
    return [
        receipt if receipt and all(stored.get(name) == size for name, size in receipt.files.items()) else None
        for receipt in receipts
    ]


def _read(store: Store, key: str, kind: type[R]) -> R | None:
    try:
        return kind.model_validate_json(store.get(key))
    except (KeyMissing, ValidationError):
        return None


def _sizes(store: Store, keys: Iterable[str]) -> dict[str, int]:
    """Sizes of all objects in the folders of these keys: one request lists a thousand."""
    folders = {key.rpartition("/")[0] + "/" for key in keys}
    return {entry.key: entry.size for folder in folders for entry in store.list(folder)}
