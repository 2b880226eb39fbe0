"""What every store promises, held against folders, moto's S3, Ceph's S3, a fake of Google's storage and Azurite."""

import pickle
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_service.store.base import Entry, Store
from data_service.store.errors import BadUri, KeyMissing, Truncated
from data_service.store.open import open_store

SLOW_AZURITE = pytest.mark.parametrize(
    "any_store",
    [
        "local",
        "s3",
        pytest.param("rgw", marks=pytest.mark.rgw),
        "gs",
        pytest.param("az", marks=[pytest.mark.azurite, pytest.mark.long]),
    ],
    indirect=True,
)


def test_a_range_beyond_the_end_is_truncated(any_store: Store) -> None:
    any_store.put("data", bytes(256))
    for start, length in ((250, 7), (256, 1), (10_000, 5)):
        with pytest.raises(Truncated, match=r"\bbyte 256\b") as caught:
            any_store.get_range("data", start, length)
        assert f"{any_store.uri}/data" in caught.value.problem


def test_a_missing_key_is_named(any_store: Store) -> None:
    any_store.put("there", b"x")
    for read in (
        any_store.get,
        lambda key: any_store.get_range(key, 0, 4),
        lambda key: any_store.get_range(key, 0, 0),
    ):
        with pytest.raises(KeyMissing) as caught:
            read("not/there")
        assert f"{any_store.uri}/not/there" in caught.value.problem
    assert any_store.size("not/there") is None


def test_a_folder_is_not_an_object(any_store: Store) -> None:
    any_store.put("folder/object", b"x")
    assert any_store.size("folder") is None
    with pytest.raises(KeyMissing):
        any_store.get("folder")


def test_of_forty_racers_one_wins_and_its_bytes_are_stored(any_store: Store) -> None:
    start = threading.Barrier(40)

    def race(number: int) -> bool:
        start.wait()
        return any_store.put_if_absent("claims/1", f"{number:05d}".encode() * 1000)

    with ThreadPoolExecutor(40) as pool:
        won = list(pool.map(race, range(40)))
    assert won.count(True) == 1
    assert any_store.get("claims/1") == f"{won.index(True):05d}".encode() * 1000
    assert [entry.key for entry in any_store.list()] == ["claims/1"]


def test_folders_are_those_directly_below_that_hold_objects(any_store: Store) -> None:
    assert list(any_store.folders()) == []
    for key in ("b/run.json", "a/deep/er/x", "c", "b-1/x", "b/y"):
        any_store.put(key, b"1")
    assert list(any_store.folders()) == ["a", "b-1", "b"]
    assert list(any_store.with_prefix("a/deep").folders()) == ["er"]


@pytest.mark.long
@SLOW_AZURITE
def test_list_goes_past_a_page(any_store: Store) -> None:
    keys = [f"many/{number:05d}" for number in range(1005)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: any_store.put(key, b""), keys))
    assert [entry.key for entry in any_store.list("many/")] == keys
    any_store.put("other", b"")
    any_store.delete_many([*keys, "many/never"])
    assert [entry.key for entry in any_store.list()] == ["other"]


@pytest.mark.long
@SLOW_AZURITE
def test_files_and_buffers_of_any_size_arrive_whole(any_store: Store, tmp_path: Path) -> None:
    data = bytes(range(256)) * (40 << 12)  # 40 MiB: several parts on S3
    source = tmp_path / "source"
    source.write_bytes(data)
    any_store.put_file("file", source)
    told: list[int] = []
    any_store.put_buffers("buffers", [memoryview(data)[:13], memoryview(b""), memoryview(data)[13:]], told.append)
    assert len(told) > 1
    assert told == sorted(set(told))
    assert told[-1] == len(data)
    any_store.put_buffers("empty", [])
    assert any_store.get("file") == data
    assert any_store.get("buffers") == data
    assert any_store.get("empty") == b""
    assert any_store.get_range("buffers", 39 << 20, 5000) == data[39 << 20 :][:5000]


def test_any_order_of_operations_does_what_it_does_to_a_dictionary(any_store: Store) -> None:
    draws = random.Random(1)
    held: dict[str, bytes] = {}
    keys = [f"{folder}/{name}" for folder in ("a", "a.b", "a/b", "a-b", "ab", "é") for name in ("0", "00", "1", "x.y")]
    for _ in range(80):
        key, data = draws.choice(keys), draws.randbytes(draws.choice([0, 1, 7, 1000]))
        match draws.choice(["put", "create", "delete", "many", "read", "list"]):
            case "put":
                any_store.put(key, data if draws.random() < 0.5 else memoryview(data))
                held[key] = data
            case "create":
                assert any_store.put_if_absent(key, data) == (key not in held)
                held.setdefault(key, data)
            case "delete":
                any_store.delete(key)
                held.pop(key, None)
            case "many":
                gone = draws.sample(keys, 3)
                any_store.delete_many(gone)
                held = {one: value for one, value in held.items() if one not in gone}
            case "read" if key in held:
                assert any_store.get(key) == held[key]
                start = draws.randint(0, len(held[key]))
                length = draws.randint(0, len(held[key]) - start)
                assert any_store.get_range(key, start, length) == held[key][start : start + length]
            case "read":
                with pytest.raises(KeyMissing):
                    any_store.get_range(key, draws.randrange(9), draws.randrange(2))
            case _:
                prefix = key[: draws.randint(0, len(key))]
                found = [Entry(one, len(held[one])) for one in sorted(held) if one.startswith(prefix)]
                assert list(any_store.list(prefix)) == found
                assert any_store.entry(key) == (Entry(key, len(held[key])) if key in held else None)
    assert {entry.key: any_store.get(entry.key) for entry in any_store.list()} == held


def test_at_is_the_same_store_further_down(any_store: Store) -> None:
    below = any_store.with_prefix("x/y/")
    below.put("z", b"1")
    assert any_store.get("x/y/z") == b"1"
    assert [entry.key for entry in below.list()] == ["z"]
    assert open_store(below.uri).get("z") == b"1"


@pytest.mark.long
def test_a_store_travels_to_another_process(any_store: Store) -> None:
    any_store.put("key", b"value")
    copy: Store = pickle.loads(pickle.dumps(any_store))  # noqa: S301
    assert copy.get("key") == b"value"
    assert copy == any_store


def test_keys_that_are_no_plain_paths_are_refused(any_store: Store) -> None:
    for key in ("", "/absolute", "a//b", "../up", "a/./b", "a/", ".tmp-mine"):
        with pytest.raises(BadUri):
            any_store.put(key, b"x")
        with pytest.raises(BadUri):
            any_store.get(key)


def test_age_goes_by_the_stores_clock_not_by_ours(any_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    any_store.put("lease/a", b"x")
    wrong = SimpleNamespace(time=lambda: time.time() + 600, monotonic=time.monotonic, sleep=time.sleep)
    for module in ("local", "s3"):  # cloud.py has no clock
        monkeypatch.setattr(f"data_service.store.{module}.time", wrong)
    age = any_store.age("lease/a")
    assert age is not None
    assert 0 <= age < 10
    assert any_store.age("lease/b") is None
    assert any_store.age("nothing/here") is None
    assert [entry.key for entry in any_store.list()] == ["lease/a"]


@pytest.mark.long
def test_young_leftovers_stay(any_store: Store) -> None:
    any_store.put("data/a", b"x")
    assert any_store.remove_leftovers("data", older_than_key="data/a") == 0
    assert any_store.get("data/a") == b"x"
