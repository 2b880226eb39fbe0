"""Retention: which checkpoints stay is a table; deleting them never leaves a run without one."""

import os
from pathlib import Path

import pytest

from checkpoints.attempt import claim
from checkpoints.commit import CommittedSave
from checkpoints.errors import Superseded
from checkpoints.gather import SingleRank
from checkpoints.layout import CheckpointName, LineageSegment
from checkpoints.listing import list_committed, list_folders, read_manifest
from checkpoints.retention import delete_expired, delete_orphans, expired_checkpoints
from checkpoints.save import Saver
from checkpoints.verify import find_newest_good
from data_service.store.local import LocalStore
from tests.support.ranks.checkpointing import SHAPES, assert_holds, commit_steps, cut, flip_bit, random_state, save


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "run")


@pytest.mark.parametrize(
    ("steps", "keep_last", "keep_every", "kept"),
    [
        ([10, 20, 30], 3, None, [10, 20, 30]),
        ([10, 20, 30], 2, None, [20, 30]),
        ([10, 20, 30], 0, None, [30]),
        ([10, 20, 30, 40], 1, 20, [20, 40]),
        ([15, 27, 38, 41, 44, 59], 1, 20, [27, 41, 59]),  # due by time: the first after each multiple
        ([5, 10, 15], 1, 100, [15]),  # step 0 is no multiple worth keeping
        ([100, 101, 102, 103], 2, 100, [100, 102, 103]),
    ],
)
def test_the_newest_and_the_multiples_stay(
    steps: list[int], keep_last: int, keep_every: int | None, kept: list[int]
) -> None:
    lineage = (LineageSegment(attempt=1, start=0, stop=steps[-1]),)
    gone = expired_checkpoints(
        [CheckpointName(1, step) for step in steps], lineage, keep_last=keep_last, keep_every=keep_every
    )
    assert sorted(set(steps) - {mark.step for mark in gone}) == kept


def test_what_was_kept_for_a_multiple_stays_kept_as_the_run_goes_on() -> None:
    marks: list[CheckpointName] = []
    for step in range(7, 700, 13):
        marks.append(CheckpointName(1, step))
        gone = expired_checkpoints(marks, (LineageSegment(attempt=1, start=0, stop=step),), keep_last=2, keep_every=100)
        marks = [mark for mark in marks if mark not in gone]
    every = [min(step for step in range(7, 700, 13) if step >= bound) for bound in range(100, 700, 100)]
    assert [mark.step for mark in marks] == sorted({*every, *list(range(7, 700, 13))[-2:]})


def test_abandoned_branches_go() -> None:
    lineage = (LineageSegment(attempt=1, start=0, stop=20), LineageSegment(attempt=3, start=20, stop=50))
    marks = [
        CheckpointName(1, 10),
        CheckpointName(1, 20),
        CheckpointName(1, 30),
        CheckpointName(2, 40),
        CheckpointName(3, 40),
        CheckpointName(3, 50),
    ]
    assert expired_checkpoints(marks, lineage, keep_last=9, keep_every=None) == [
        CheckpointName(1, 30),
        CheckpointName(2, 40),
    ]


@pytest.mark.parametrize("damage", ["data missing", "manifest unreadable"])
def test_the_last_good_one_stays_while_the_newest_is_damaged(store: LocalStore, damage: str) -> None:
    attempt = claim(store)
    commit_steps(store, attempt, 10, 20)
    if damage == "data missing":
        store.delete(CheckpointName(1, 20).file_key(0))
    else:
        store.put(CheckpointName(1, 20).manifest_key, b"{}")
    assert delete_expired(store, attempt, keep_last=1, keep_every=None).deleted == ()
    good = find_newest_good(store, SingleRank())
    assert good is not None
    assert good.manifest.step == 10


@pytest.mark.parametrize("keep_last", [1, 2])
def test_rot_that_no_size_shows_takes_no_good_one_with_it(store: LocalStore, keep_last: int) -> None:
    attempt = claim(store)
    commit_steps(store, attempt, 10, 20, 30)
    for step in (20, 30)[-keep_last:]:
        flip_bit(store, CheckpointName(1, step).file_key(0))
    assert delete_expired(store, attempt, keep_last=keep_last, keep_every=None).deleted == ()
    good = find_newest_good(store, SingleRank())
    assert good is not None
    assert good.manifest.step == (10 if keep_last == 2 else 20)


def test_one_of_as_many_as_are_kept_is_read_back(store: LocalStore) -> None:
    reads = _Counting(store)
    attempt = claim(store)
    saver, proven = Saver(store, attempt, SingleRank()), frozenset[CheckpointName]()
    read = []
    for step in range(1, 10):
        assert isinstance(save(saver, step, step), CommittedSave)
        reads.ranges = 0
        proven = delete_expired(reads, attempt, keep_last=3, keep_every=None, proven=proven).proven  # type: ignore[arg-type]
        read += [step] * (reads.ranges > 0)
    assert read == [4, 7]
    assert list_committed(store) == [CheckpointName(1, 9), CheckpointName(1, 8), CheckpointName(1, 7)]


def test_the_one_resumed_from_is_known_to_be_good(store: LocalStore) -> None:
    first = claim(store)
    commit_steps(store, first, 10)
    first.record_end(0.0)
    attempt = claim(store)
    commit_steps(store, attempt, 20, 30, resumed=read_manifest(store, CheckpointName(1, 10)))
    flip_bit(store, CheckpointName(2, 30).file_key(0))
    proven = frozenset({CheckpointName(1, 10)})
    tidied = delete_expired(store, attempt, keep_last=1, keep_every=None, proven=proven)
    assert (tidied.deleted, tidied.proven) == ((), proven)


class _Counting:
    """A store that counts what is read back."""

    def __init__(self, store: LocalStore) -> None:
        self._store, self.ranges = store, 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.ranges += 1
        return self._store.get_range(key, start, length)


def test_a_zombie_cannot_delete(store: LocalStore) -> None:
    zombie = claim(store)
    commit_steps(store, zombie, 10, 20)
    zombie.record_end(0.0)
    claim(store)
    with pytest.raises(Superseded):
        delete_expired(store, zombie, keep_last=1, keep_every=None)
    with pytest.raises(Superseded):
        delete_orphans(store, zombie)
    assert list_committed(store) == [CheckpointName(1, 20), CheckpointName(1, 10)]


def test_orphans_of_dead_attempts_go_and_saves_under_way_stay(store: LocalStore) -> None:
    dead = claim(store)
    commit_steps(store, dead, 10)
    abandoned = Saver(store, dead, SingleRank())
    abandoned.begin(20, cut(random_state(20), (), 0), SHAPES, {})
    abandoned.wait_for_all(lambda sent: None)
    dead.record_end(0.0)
    attempt = claim(store)
    saver = Saver(store, attempt, SingleRank(), resumed=read_manifest(store, CheckpointName(1, 10)))
    saver.begin(15, cut(random_state(15), (), 0), SHAPES, {})
    saver.wait_for_all(lambda sent: None)
    assert delete_expired(store, attempt, keep_last=1, keep_every=None).orphans == 1
    assert [folder.name for folder in list_folders(store)] == [CheckpointName(2, 15), CheckpointName(1, 10)]
    saver.commit()
    assert_holds(store, read_manifest(store, CheckpointName(2, 15)), random_state(15))


def test_a_half_deleted_checkpoint_is_swept_later(store: LocalStore) -> None:
    attempt = claim(store)
    commit_steps(store, attempt, 10, 20)
    store.delete(CheckpointName(1, 10).manifest_key)
    assert delete_expired(store, attempt, keep_last=2, keep_every=None).orphans == 1
    assert [folder.name for folder in list_folders(store)] == [CheckpointName(1, 20)]


def test_remains_of_an_earlier_attempts_writes_go_with_a_commit(store: LocalStore) -> None:
    """Those that this attempt may still be writing stay."""
    first = claim(store)
    commit_steps(store, first, 10)
    left = [store.root / "checkpoints" / ".tmp-killed", store.root / "metrics" / ".tmp-killed"]
    for path in left:
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half")
        earlier = path.stat().st_mtime - 1  # the clock of a file system has ticks
        os.utime(path, (earlier, earlier))
    second = claim(store)
    young = store.root / "checkpoints" / ".tmp-writing"
    young.write_bytes(b"half")
    delete_orphans(store, second)
    assert [path.exists() for path in (*left, young)] == [False, False, True]
