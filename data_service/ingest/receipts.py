"""Receipts: what a finished task left, written last. A build that continues trusts them and nothing else."""

from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from data_service.store.base import Store
from data_service.store.errors import KeyMissing


class Receipt(BaseModel):
    """What a finished task left.

    Attributes:
        source: what it was made from, as `Task.sources` says it; a receipt made from something else is none.
        files: the objects the task wrote, with their sizes in bytes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: str
    files: dict[str, int]


R = TypeVar("R", bound=Receipt)


def write_receipt(store: Store, key: str, receipt: Receipt) -> None:
    """Record that a task is finished. The objects it names must be there already."""
    store.put(key, receipt.model_dump_json().encode())


def read_receipt(store: Store, key: str, kind: type[R]) -> R | None:
    """The receipt, if there is one and all it names is there in full; None if the task must be done again."""
    try:
        receipt = kind.model_validate_json(store.get(key))
    except (KeyMissing, ValidationError):
        return None
    whole = all(store.size(name) == size for name, size in receipt.files.items())
    return receipt if whole else None
