"""A process that dies at any system call of a write leaves the old object or the new one."""

from pathlib import Path

import pytest

from data_service.store.local import LocalStore
from tests.support.faults.process import dies_at

OLD, NEW = b"old" * 1000, b"new" * 2000


@pytest.mark.long
@pytest.mark.parametrize("operation", ["put", "put_if_absent"])
def test_dying_anywhere_in_a_write(tmp_path: Path, operation: str) -> None:
    crashes = 0
    for call in range(1, 1000):
        store = LocalStore(tmp_path / f"{call}")
        key = "folder/key"
        if operation == "put":
            store.put(key, OLD)
        if not dies_at(call, lambda: getattr(store, operation)(key, NEW)):  # noqa: B023
            break
        crashes += 1
        found = {entry.key: store.get(entry.key) for entry in store.list()}
        assert found in ([{key: OLD}, {key: NEW}] if operation == "put" else [{}, {key: NEW}])
        store.put(key, NEW)
        assert store.get(key) == NEW
        store.remove_leftovers("", older_than_key=None)
        assert [path.name for path in (store.root / "folder").iterdir()] == ["key"]
    assert crashes >= 6
    assert store.get("folder/key") == NEW
