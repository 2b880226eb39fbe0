"""A live page requests each version of an object once, and reads what is there."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.store.base import Entry
from data_service.store.errors import KeyMissing
from data_service.store.local import LocalStore
from launcher.observe.watch.live import _CachingStore, draw_run_page, make_caching_store
from tests.support.runs.untrained import ToldRun

KEYS = ["metrics/a", "metrics/b", "events/c"]
DEEDS = st.lists(
    st.tuples(st.sampled_from(["put", "delete", "list", "get", "range"]), st.sampled_from(KEYS)), max_size=30
)


@dataclass(frozen=True)
class CountingStore(LocalStore):
    """A folder that notes every object it is asked for."""

    requested: list[str] = field(default_factory=list, compare=False)

    def get(self, key: str) -> bytes:
        self.requested.append(key)
        return super().get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.requested.append(key)
        return super().get_range(key, start, length)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        return super().list(prefix)


@settings(max_examples=60, deadline=None)
@given(deeds=DEEDS)
def test_what_is_read_after_a_listing_is_what_is_there(deeds: list[tuple[str, str]]) -> None:
    with TemporaryDirectory() as folder:
        store = LocalStore(Path(folder, "run"))
        cached = _CachingStore(store, str(Path(folder, "copies")))
        for number, (what, key) in enumerate(deeds):
            match what:
                case "put":
                    store.put(key, b"%d content" % number)
                case "delete":
                    store.delete(key)
                case _:
                    keys = [entry.key for entry in cached.list()]
                    assert keys == [entry.key for entry in store.list()]
                    if key in keys:
                        assert cached.get(key) == store.get(key)
                        assert cached.get_range(key, 1, 3) == store.get_range(key, 1, 3)


def test_an_object_is_requested_once_for_each_version(tmp_path: Path) -> None:
    run = ToldRun(tmp_path / "run")
    run.begin(1)
    for first in range(0, 300, 100):
        run.steps(1, first, first + 100)
    store = CountingStore(run.folder)
    cached = _CachingStore(store, str(tmp_path / "copies"))

    def requested() -> list[str]:
        store.requested.clear()
        draw_run_page(str(run.folder), cached, "")
        return [key for key in store.requested if key.startswith(("metrics/", "events/"))]

    at_first = requested()
    assert len(at_first) == len(set(at_first)) == 4
    assert requested() == []
    run.steps(1, 300, 310)
    assert requested() == ["metrics/a000001/00000003.jsonl"]


def test_a_local_run_is_not_copied(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    assert make_caching_store(store, str(tmp_path / "copies")) is store


def test_an_object_that_is_gone_is_missing(tmp_path: Path) -> None:
    with pytest.raises(KeyMissing):
        _CachingStore(LocalStore(tmp_path / "run"), str(tmp_path / "copies")).get("metrics/a")
