"""Rows of tables about a run's checkpoints, kept with the run for its report: `tables/<digest>.json`, one each."""

from collections.abc import Sequence

from data_service.store.base import Store
from launcher.evaluate.table import ROWS, Row
from launcher.run.sealed import read_all, seal


def keep_rows(store: Store, rows: Sequence[Row]) -> None:
    """Put with the run at `store`; a row about the same weights, task and measure gives way. Raises StoreError."""
    for row in rows:
        store.put(row.path, seal(row))


def kept_rows(store: Store) -> list[Row]:
    """By step, then by task. What is no row is passed over. Raises StoreError kinds."""
    found = read_all(store, (entry.key for entry in store.list(ROWS)), Row)
    return sorted(found, key=lambda row: (row.step or 0, row.task, row.data))
