"""Damage that keeps its form: a manifest that makes no sense is passed over, and records have an answer."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from checkpoints.attempt import Attempt, Owner, claim
from checkpoints.errors import CheckpointError, DamagedCheckpoint
from checkpoints.gather import SingleRank
from checkpoints.layout import CheckpointName, add_digest, strip_digest
from checkpoints.listing import Rewind, checkpoint_rows, read_manifest, read_rewinds, record_rewind
from checkpoints.ownership import StopRequest, find_stop_request, read_attempt_status, request_stop
from checkpoints.verify import find_newest_good, verify_all
from data_service.store.base import Store
from tests.support.ranks.checkpointing import assert_holds, commit_steps, random_state
from tests.support.stores.faulty import ClockedStore

NEWEST = CheckpointName(1, 20)
ELSEWHERE = Owner(host="node-9", processes="another boot", pid=77, started=5.0, claimed=5.0)
Place = tuple[str | int, ...]


@pytest.fixture
def store(tmp_path: Path) -> ClockedStore:
    """A run of another machine, with checkpoints at steps 10 and 20."""
    store = ClockedStore(tmp_path / "run")
    commit_steps(store, claim(store, owner=ELSEWHERE), 10, 20)
    return store


def content(store: Store) -> dict[str, Any]:
    body = strip_digest("manifest", store.get(NEWEST.manifest_key))
    assert body is not None
    manifest: dict[str, Any] = json.loads(body)
    return manifest


def publish(store: Store, manifest: object) -> None:
    store.put(NEWEST.manifest_key, add_digest("manifest", json.dumps(manifest).encode()))


def places(value: Any, above: Place = ()) -> Iterator[Place]:
    """Of everything in a JSON value but what only the trainer understands."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, inner in entries:
        if above or name not in ("state", "versions"):
            yield (*above, name)
            yield from places(inner, (*above, name))


def changed(manifest: dict[str, Any], place: Place, value: object) -> dict[str, Any]:
    """With another `value` at `place`; twice what is there if that is "twice", without it if "gone"."""
    result = copy.deepcopy(manifest)
    inner: Any = result
    for name in place[:-1]:
        inner = inner[name]
    if value == "gone":
        del inner[place[-1]]
    elif value == "twice" and isinstance(inner, list) and isinstance(place[-1], int):
        inner.append(inner[place[-1]])
    else:
        inner[place[-1]] = value
    return result


_VALUES = st.one_of(
    st.sampled_from([None, "", "x", [], {}, "gone", "twice", -1, 0, 1, 3, 1 << 40, 1 << 62, 1 << 80]),
    st.sampled_from([0.5, float("nan"), float("inf"), 10**400, [1 << 40, 1 << 40, 0], "../../manifest.json"]),
    st.integers(0, 60_000),
)


@pytest.mark.heavy
@settings(deadline=None, max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_manifest_with_anything_else_anywhere_loads_the_same_or_is_passed_over(
    store: ClockedStore, data: st.DataObject
) -> None:
    original = store.get(NEWEST.manifest_key)
    manifest = content(store)
    place = data.draw(st.sampled_from([place for place in places(manifest) if place != ("format",)]))
    value = data.draw(_VALUES)
    assume((place, value) != (("shapes", "none"), "gone"))  # it has no elements, so no other trace: a load names it
    publish(store, changed(manifest, place, value))
    try:
        reports = {report.name: report.problems for report in verify_all(store)}
        good = find_newest_good(store, SingleRank())
        assert good is not None
        assert (good.manifest.name == NEWEST) == (reports[NEWEST] == ())
        assert_holds(store, good.manifest, random_state(good.manifest.step))
        assert good.manifest.name in (NEWEST, CheckpointName(1, 10))
    finally:
        store.put(NEWEST.manifest_key, original)


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (("files", 0, "hashes"), [], "0 hashes for 1 chunks"),
        (("files", 0, "hashes", 0), "twice", "2 hashes for 1 chunks"),
        (("files", 0, "chunk"), 0, "greater than 0"),
        (("files", 0, "chunk"), -4, "greater than 0"),
        (("files", 0, "chunk"), 1 << 40, "less than or equal to"),
        (("files", 0, "size"), -1, "greater than or equal to 0"),
        (("files", 0, "key"), "checkpoints/other", "should be"),
        (("pieces", 0, "file"), 1, "lies in file 1 of 1"),
        (("pieces", 0, "file"), -1, "greater than or equal to 0"),
        (("pieces", 0, "start"), -1, "greater than or equal to 0"),
        (("pieces", 0, "offsets", "master"), 1 << 30, "where the piece before ends"),
        (("pieces", 0, "offsets", "master"), 0, "where the piece before ends"),
        (("shapes", "none"), [0, 1 << 61, 1 << 61], "has the shape"),
        (("shapes", "scale"), [-1, -1], "greater than or equal to 0"),
        (("shapes", "scale"), [1] * 65, "at most 64"),
        (("kinds", 0), "twice", "named twice"),
        (("memory",), {"scale": []}, "is a parameter and a memory"),
        (("created",), float("inf"), "finite"),
        (("lineage",), [], "the history ends at step 0"),
        (("lineage", 0, "start"), 5, "cannot have taken steps 5 to 20"),
        (("lineage", 0, "stop"), 19, "the history ends at step 19"),
    ],
)
def test_what_could_never_be_loaded_is_named(store: ClockedStore, place: Place, value: object, reason: str) -> None:
    publish(store, changed(content(store), place, value))
    with pytest.raises(DamagedCheckpoint, match="read") as caught:
        read_manifest(store, NEWEST)
    assert reason in caught.value.problem
    assert {row.step for row in checkpoint_rows(store) if row.problem} == {20}


_RECORDS = (
    "attempts/000001.json",
    "attempts/000001.heartbeat.json",
    "attempts/000001.ended.json",
    "attempts/stop.json",
    "checkpoints/rewind-a000001.json",
)


@pytest.mark.heavy
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_record_that_was_damaged_at_random_has_an_answer(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    store = ClockedStore(tmp_path_factory.mktemp("run"))
    attempt = claim(store, owner=ELSEWHERE)
    attempt.write_heartbeat(5.0)
    attempt.record_end(6.0)
    request_stop(store, StopRequest(attempt=1, by="ann", time=5.0))
    record_rewind(store, rewind_to(CheckpointName(1, 7)), attempt)
    key = data.draw(st.sampled_from(_RECORDS))
    original = store.get(key)
    text = bytearray(original)
    where = int(data.draw(st.floats(0, 1, exclude_max=True)) * len(text))
    text = text[:where] + bytes(data.draw(st.lists(st.integers(0, 255), max_size=1)))
    text += original[where + 1 :] if data.draw(st.booleans()) else b""
    store.put(key, bytes(text))
    found = read_attempt_status(store, 10.0)
    assert found is not None
    assert found.attempt == 1
    find_stop_request(store, 1)
    store.pass_(100)
    assert claim(store).number == 2
    assert Attempt(store, 1).superseding_owner(ELSEWHERE) is not None
    if key != _RECORDS[-1] or bytes(text) == original:
        assert read_rewinds(store) == [rewind_to(CheckpointName(1, 7))]
        return
    with pytest.raises(DamagedCheckpoint, match="rewind-a000001"):
        read_rewinds(store)


def rewind_to(mark: CheckpointName) -> Rewind:
    return Rewind(attempt=1, to=mark, began=9, reached=12, cause="a spike", skips=((0, 0, 4, 9),))


def test_a_rewind_that_cannot_be_read_brings_nothing_back(store: ClockedStore) -> None:
    record_rewind(store, rewind_to(CheckpointName(1, 10)), Attempt(store, 1))
    store.put("checkpoints/rewind-a000001.json", b"")
    for ask in (lambda: find_newest_good(store, SingleRank()), lambda: checkpoint_rows(store)):
        with pytest.raises(CheckpointError, match="rewind-a000001") as caught:
            ask()
        assert " copy" in caught.value.remedy
