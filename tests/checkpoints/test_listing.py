"""Going back: what was committed since does not count any more, however the run is cut short afterwards."""

from pathlib import Path

import pytest

from checkpoints.attempt import Attempt, claim
from checkpoints.errors import CheckpointError, Superseded
from checkpoints.gather import SingleRank
from checkpoints.layout import CheckpointManifest, CheckpointName, LineageSegment
from checkpoints.listing import (
    Rewind,
    SampleSpan,
    checkpoint_rows,
    list_committed,
    list_folders,
    read_manifest,
    read_rewinds,
    record_rewind,
    skipped_ranges,
)
from checkpoints.retention import delete_expired, expired_checkpoints
from checkpoints.verify import find_newest_good
from data_service.store.local import LocalStore
from tests.support.ranks.checkpointing import commit_steps

LEFT_OUT: tuple[SampleSpan, ...] = ((0, 0, 40, 90),)


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A run whose first attempt committed steps 10 to 40 and went back to 20."""
    store = LocalStore(tmp_path / "run")
    attempt = claim(store)
    commit_steps(store, attempt, 10, 20, 30, 40)
    record_rewind(store, went_back(1, CheckpointName(1, 20)), attempt)
    attempt.record_end(0.0)
    return store


def went_back(attempt: int, to: CheckpointName | None, left_out: tuple[SampleSpan, ...] = LEFT_OUT) -> Rewind:
    return Rewind(attempt=attempt, to=to, began=36, reached=41, cause="a spike", skips=left_out)


def newest(store: LocalStore) -> CheckpointManifest:
    good = find_newest_good(store, SingleRank())
    assert good is not None
    return good.manifest


def test_the_run_goes_on_from_where_it_went_back_to(store: LocalStore) -> None:
    assert newest(store).name == CheckpointName(1, 20)
    assert list_committed(store) == [CheckpointName(1, 20), CheckpointName(1, 10)]
    assert [(row.step, row.abandoned) for row in checkpoint_rows(store)] == [
        (40, True),
        (30, True),
        (20, False),
        (10, False),
    ]


def test_a_later_attempts_checkpoints_count_and_falling_back_passes_over_what_was_left(
    store: LocalStore,
) -> None:
    commit_steps(store, claim(store), 25, 33, resumed=read_manifest(store, CheckpointName(1, 20)))
    assert newest(store).name == CheckpointName(2, 33)
    assert newest(store).lineage == (
        LineageSegment(attempt=1, start=0, stop=20),
        LineageSegment(attempt=2, start=20, stop=33),
    )
    for step in (33, 25):
        store.delete(CheckpointName(2, step).file_key(0))
    assert newest(store).name == CheckpointName(1, 20), "not the steps 30 and 40 that are still stored"


def test_going_back_twice_without_a_commit_between(store: LocalStore) -> None:
    second = claim(store)
    record_rewind(store, went_back(2, CheckpointName(1, 10), (*LEFT_OUT, (0, 0, 90, 99))), second)
    assert newest(store).name == CheckpointName(1, 10)
    assert skipped_ranges(newest(store), read_rewinds(store)) == ((0, 0, 40, 90), (0, 0, 90, 99))


def test_what_is_left_out_is_known_from_the_record_and_then_from_the_manifests(store: LocalStore) -> None:
    assert skipped_ranges(newest(store), read_rewinds(store)) == LEFT_OUT
    assert skipped_ranges(None, []) == ()
    later = read_manifest(store, CheckpointName(1, 20)).model_copy(
        update={"attempt": 2, "state": {"skips": [[0, 0, 40, 90], [1, 2, 0, 7]]}}
    )
    assert skipped_ranges(later, read_rewinds(store)) == ((0, 0, 40, 90), (1, 2, 0, 7))
    assert skipped_ranges(later, []) == ((0, 0, 40, 90), (1, 2, 0, 7)), "a copy of the checkpoint alone suffices"


def test_a_run_may_be_told_before_it_begins(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "fresh")
    record_rewind(store, went_back(0, None), Attempt(store, 0))
    assert find_newest_good(store, SingleRank()) is None
    assert skipped_ranges(None, read_rewinds(store)) == LEFT_OUT
    commit_steps(store, claim(store), 10)
    assert newest(store).name == CheckpointName(1, 10)


def test_a_zombie_does_not_go_back(store: LocalStore) -> None:
    claim(store)
    with pytest.raises(Superseded):
        record_rewind(store, went_back(1, CheckpointName(1, 10)), Attempt(store, 1))


def test_nor_does_an_attempt_do_so_twice(store: LocalStore) -> None:
    record_rewind(
        store, went_back(1, CheckpointName(1, 20)), Attempt(store, 1)
    )  # the answer to the first had been lost
    with pytest.raises(CheckpointError, match="differs"):
        record_rewind(store, went_back(1, CheckpointName(1, 10)), Attempt(store, 1))
    assert newest(store).name == CheckpointName(1, 20)


def test_what_was_left_is_deleted_after_the_next_commit_and_not_before(store: LocalStore) -> None:
    attempt = claim(store)
    assert delete_expired(store, attempt, keep_last=1, keep_every=None).deleted == (
        CheckpointName(1, 10),
        CheckpointName(1, 30),
        CheckpointName(1, 40),
    )
    assert newest(store).name == CheckpointName(1, 20), "the way on stays, whatever else goes"
    commit_steps(store, attempt, 25, resumed=newest(store))
    delete_expired(store, attempt, keep_last=1, keep_every=None)
    assert [folder.name for folder in list_folders(store)] == [CheckpointName(2, 25)]


@pytest.mark.parametrize(
    ("latest_rewind_step", "kept"),
    [
        (None, [50]),
        (50, [50]),
        (49, [40, 50]),
        (40, [40, 50]),
        (25, [20, 30, 40, 50]),
        (9, [10, 20, 30, 40, 50]),
    ],
)
def test_the_way_back_is_kept(latest_rewind_step: int | None, kept: list[int]) -> None:
    """However few are kept, those are from which one must be as old as that, now or later."""
    marks = [CheckpointName(1, step) for step in (10, 20, 30, 40, 50)]
    lineage = (LineageSegment(attempt=1, start=0, stop=50),)
    gone = expired_checkpoints(marks, lineage, keep_last=1, keep_every=None, latest_rewind_step=latest_rewind_step)
    assert [mark.step for mark in marks if mark not in gone] == kept


@pytest.mark.parametrize("every", [1, 3, 10])
def test_there_is_a_way_back_at_every_step_of_a_long_run(every: int) -> None:
    """Ten steps back from wherever the run is, as early as there can be one, with one checkpoint kept otherwise."""
    marks: list[CheckpointName] = []
    for step in range(every, 300, every):
        marks.append(CheckpointName(1, step))
        lineage = (LineageSegment(attempt=1, start=0, stop=step),)
        gone = expired_checkpoints(marks, lineage, keep_last=1, keep_every=None, latest_rewind_step=step - 10)
        marks = [mark for mark in marks if mark not in gone]
        if step - 10 >= every:
            found = max(mark.step for mark in marks if mark.step <= step - 10)
            assert step - 10 - found < every
        assert len(marks) <= 2 + 10 // every
