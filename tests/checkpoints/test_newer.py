"""What a newer version of ours has written is good: it is refused, and neither passed over nor deleted."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints.attempt import Attempt, Owner, claim
from checkpoints.errors import NewerFormat
from checkpoints.gather import SingleRank
from checkpoints.layout import CheckpointName, add_digest, strip_digest
from checkpoints.listing import Rewind, checkpoint_rows, list_committed, read_rewinds, record_rewind
from checkpoints.retention import delete_expired
from checkpoints.verify import find_newest_good, verify_all
from data_service.store.local import LocalStore
from tests.support.ranks.checkpointing import commit_steps

names = st.text("abcdefghij", min_size=3, max_size=9).filter(lambda name: name not in ("digest",))
anything = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=4)
NEWER = st.one_of(
    st.fixed_dictionaries({"format": st.integers(2, 1 << 40)}),
    st.builds(lambda number, more: more | {"format": number}, st.integers(2, 99), st.dictionaries(names, anything)),
    st.dictionaries(names.map("new_{}".format), anything, min_size=1),
)
FEW = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def run(tmp_path: Path) -> tuple[LocalStore, Attempt]:
    """Checkpoints of steps 10, 20 and 30."""
    store = LocalStore(tmp_path)
    attempt = claim(store)
    commit_steps(store, attempt, 10, 20, 30)
    return store, attempt


def rewrite(store: LocalStore, key: str, what: str, change: Mapping[str, object]) -> bytes:
    body = strip_digest(what, store.get(key))
    assert body is not None
    store.put(key, newer := add_digest(what, json.dumps(json.loads(body) | change).encode()))
    return newer


@FEW
@given(NEWER)
def test_no_older_one_takes_its_place(run: tuple[LocalStore, Attempt], change: Mapping[str, object]) -> None:
    store, _ = run
    key = CheckpointName(1, 30).manifest_key
    original = store.get(key)
    try:
        newer = rewrite(store, key, "manifest", change)
        with pytest.raises(NewerFormat):
            find_newest_good(store, SingleRank())
        assert {row.step for row in checkpoint_rows(store) if row.problem} == {30}
        assert [len(report.problems) for report in verify_all(store)] == [1, 0, 0]
        assert store.get(key) == newer
    finally:
        store.put(key, original)


@FEW
@given(NEWER, st.sampled_from([10, 20, 30]))
def test_it_is_never_deleted(tmp_path_factory: pytest.TempPathFactory, change: Mapping[str, object], step: int) -> None:
    store = LocalStore(tmp_path_factory.mktemp("run"))
    attempt = claim(store)
    commit_steps(store, attempt, 10, 20, 30)
    rewrite(store, CheckpointName(1, step).manifest_key, "manifest", change)
    attempt.record_end(0.0)
    delete_expired(store, claim(store), keep_last=1, keep_every=None)
    kept = {mark.step for mark in list_committed(store)}
    assert kept == ({10, 20, 30} if step == 30 else {step, 30})


@FEW
@given(NEWER)
def test_a_rewind_is_obeyed_or_refused(tmp_path_factory: pytest.TempPathFactory, change: Mapping[str, object]) -> None:
    store = LocalStore(tmp_path_factory.mktemp("run"))
    attempt = claim(store, owner=Owner.for_this_process(0.0))
    record_rewind(store, Rewind(attempt=1, to=None, began=1, reached=2, cause="a spike", skips=()), attempt)
    (key,) = (entry.key for entry in store.list("checkpoints/rewind"))
    rewrite(store, key, "rewind", change)
    with pytest.raises(NewerFormat):
        read_rewinds(store)
