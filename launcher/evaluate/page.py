"""Rows of tables about a run's checkpoints, kept with the run for its report: `tables/<digest>.json`, one each."""

import json
from collections.abc import Sequence

from data_service.store.base import Store
from data_service.store.together import together
from data_service.store.verified import digest
from launcher.evaluate.sealed import read, seal
from launcher.evaluate.table import Row

_ROOT = "tables/"


def keep_rows(store: Store, rows: Sequence[Row]) -> None:
    """Put with the run at `store`; a row about the same weights, task and measure gives way. Raises StoreError."""
    for row in rows:
        about = json.dumps([row.weights, row.step, row.measure, row.task, row.data])
        store.put(f"{_ROOT}{digest(about.encode())}.json", seal(row))


def kept_rows(store: Store) -> list[Row]:
    """By step, then by task. What is no row is passed over. Raises StoreError kinds."""
    keys = [entry.key for entry in store.list(_ROOT)]
    found = together(lambda key: read(store, key, Row), keys)
    return sorted((row for row in found if row), key=lambda row: (row.step or 0, row.task, row.data))
