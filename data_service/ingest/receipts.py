"""Receipts: what a finished task left, written last. A build that continues trusts them and nothing else."""

from collections.abc import Iterable, Sequence
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from data_service.store.together import together


class Receipt(BaseModel):
    """`files` are the objects the task wrote, with their sizes in bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: dict[str, int]


R = TypeVar("R", bound=Receipt)


def write_receipt(store: Store, key: str, receipt: Receipt) -> None:
    """Record that a task is finished. The objects it names must be there already."""
    store.put(key, receipt.model_dump_json().encode())


def find_receipts(store: Store, keys: Sequence[str], kind: type[R]) -> list[R | None]:
    """For each key its receipt, if there is one and all it names is there in full; None: to be done again."""
    written = _sizes(store, keys)

    def read(key: str) -> R | None:
        return _read(store, key, kind) if key in written else None

    receipts = list(together(read, keys))
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
