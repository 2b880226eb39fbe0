"""A process that dies anywhere in a write leaves the old object or the new one; anywhere in a save or a retention, a
good checkpoint remains, and the next start works."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from checkpoints.attempt import Attempt, claim
from checkpoints.commit import CommittedSave
from checkpoints.gather import SingleRank
from checkpoints.layout import CheckpointManifest, CheckpointName
from checkpoints.listing import list_folders
from checkpoints.retention import delete_expired
from checkpoints.save import Saver
from checkpoints.verify import find_newest_good, verify_all
from data_service.store.base import Store
from data_service.store.local import LocalStore
from data_service.store.open import open_store
from tests.support.faults.process import dies_at, files_limited_to
from tests.support.ranks.checkpointing import SHAPES, assert_holds, commit_steps, cut, random_state
from tests.support.stores.s3 import S3Server

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


def resume(store: Store) -> tuple[Attempt, CheckpointManifest]:
    attempt = claim(store)
    good = find_newest_good(store, SingleRank())
    assert good is not None
    assert good.passed_over == ()
    return attempt, good.manifest


def go_on(store: Store, step: int) -> None:
    """A start of the run that saves once and keeps only that."""
    attempt, manifest = resume(store)
    commit_steps(store, attempt, step, resumed=manifest)
    delete_expired(store, attempt, keep_last=1, keep_every=None)
    attempt.record_end(0.0)


@pytest.mark.long
def test_dying_at_any_file_system_change_of_a_run(tmp_path: Path) -> None:
    base = LocalStore(tmp_path / "base")
    attempt = claim(base)
    commit_steps(base, attempt, 10)
    attempt.record_end(0.0)
    resumed_from = []
    for call in range(1, 10_000):
        store = LocalStore(tmp_path / f"{call}")
        shutil.copytree(base.root, store.root)
        if not dies_at(call, lambda: go_on(store, 20)):  # noqa: B023
            break
        good = find_newest_good(store, SingleRank())
        assert good is not None
        assert all(report.problems == () for report in verify_all(store))
        assert_holds(store, good.manifest, random_state(good.manifest.step))
        resumed_from.append(good.manifest.step)
        go_on(store, 30)
        store.remove_leftovers("", older_than_key=None)
        newest = find_newest_good(store, SingleRank())
        assert newest is not None
        assert_holds(store, newest.manifest, random_state(30))
        assert [folder.name.step for folder in list_folders(store)] == [30]
        shutil.rmtree(store.root)
    assert resumed_from == sorted(resumed_from)
    assert resumed_from.count(10) > 10  # while claiming, uploading, committing
    assert resumed_from.count(20) > 5  # while deleting step 10


class Dying:
    """A store whose process ends instead of making its n-th change."""

    def __init__(self, store: Store, change: int) -> None:
        self._store, self._left = store, change

    def __getattr__(self, name: str) -> Any:
        if name in ("put", "put_buffers", "put_if_absent", "delete"):
            self._left -= 1
            if self._left == 0:
                os._exit(9)
        return getattr(self._store, name)


@pytest.mark.long
@pytest.mark.rgw
def test_dying_at_any_change_of_a_run_on_s3(rgw: S3Server) -> None:
    bucket = open_store(f"s3://{rgw.new_bucket()}")
    for change in range(1, 1000):
        store = bucket.with_prefix(f"run-{change}")
        attempt = claim(store)
        commit_steps(store, attempt, 10)
        attempt.record_end(0.0)
        child = os.fork()
        if child == 0:
            try:
                go_on(Dying(store, change), 20)
            finally:
                os._exit(0)
        died = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
        good = find_newest_good(store, SingleRank())
        assert good is not None
        assert all(report.problems == () for report in verify_all(store))
        assert_holds(store, good.manifest, random_state(good.manifest.step))
        if not died:
            assert good.manifest.step == 20
            break
        go_on(store, 30)
        assert [folder.name.step for folder in list_folders(store)] == [30]
    assert change == 7  # after the claim, data, manifest, two deletions, end


def test_a_full_disk_costs_one_checkpoint_and_says_so(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    attempt = claim(store)
    commit_steps(store, attempt, 10)
    saver = Saver(store, attempt, SingleRank(), resumed=None)
    with files_limited_to(4096):
        saver.begin(20, cut(random_state(20), (), 0), SHAPES, {})
        outcome = saver.commit()
    assert " space " in getattr(outcome, "reason", "")
    good = find_newest_good(store, SingleRank())
    assert good is not None
    assert good.manifest.name == CheckpointName(1, 10)
    saver.begin(21, cut(random_state(21), (), 0), SHAPES, {})
    assert isinstance(saver.commit(), CommittedSave)
