"""What only folders do: file-system errors, races with their own clean-up, leftovers of interrupted writes."""

import errno
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from data_service.store.errors import AccessDenied, BadUri, OutOfSpace, StoreError, StoreUnavailable
from data_service.store.local import LocalStore
from tests.support.faults.process import files_limited_to


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "store")


def test_a_write_without_room_fails_and_leaves_the_old_bytes_and_nothing_else(store: LocalStore) -> None:
    store.put("a/b", b"old")
    with files_limited_to(1 << 16), pytest.raises(OutOfSpace, match="a/b"):
        store.put("a/b", bytes(1 << 20))
    assert store.get("a/b") == b"old"
    assert os.listdir(store.root / "a") == ["b"]


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, OutOfSpace),
        (errno.EDQUOT, OutOfSpace),
        (errno.EROFS, AccessDenied),
        (errno.EIO, StoreUnavailable),
    ],
)
def test_the_systems_errors_have_our_names(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception]
) -> None:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(kind, match=os.strerror(number)):
        store.put("key", b"x")


def test_a_folder_of_somebody_else_is_denied(store: LocalStore) -> None:
    store.put("mine/key", b"x")
    (store.root / "mine").chmod(0o500)
    root = os.geteuid() == 0
    if root:
        store.root.chmod(0o700)
        os.seteuid(65534)
    try:
        with pytest.raises(AccessDenied, match="Permission denied"):
            store.put("mine/other", b"x")
    finally:
        if root:
            os.seteuid(0)
        (store.root / "mine").chmod(0o700)


def test_a_key_below_an_object_is_refused(store: LocalStore) -> None:
    store.put("a", b"x")
    with pytest.raises(BadUri, match="written"):
        store.put("a/b", b"x")
    store.put("folder/key", b"x")
    with pytest.raises(BadUri, match="written"):
        store.put_if_absent("folder", b"x")


def test_deleting_leaves_no_empty_folders(store: LocalStore) -> None:
    store.put("a/b/c", b"x")
    store.put("a/d", b"x")
    store.delete("a/b/c")
    assert os.listdir(store.root / "a") == ["d"]
    store.delete("a/d")
    assert os.listdir(store.root) == []


@pytest.mark.long
def test_writers_win_against_deletes_that_take_their_folder_away(store: LocalStore) -> None:
    start = threading.Barrier(2)

    def churn(key: str) -> None:
        start.wait()
        for _ in range(300):
            store.put(key, b"x")
            store.delete(key)
        store.put(key, key.encode())

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(churn, ["folder/a", "folder/b"]))
    assert [store.get(entry.key) for entry in store.list()] == [b"folder/a", b"folder/b"]


def test_leftovers_are_invisible_and_removed_when_old(store: LocalStore) -> None:
    store.put("data/a", b"x")
    left = store.root / "data" / ".tmp-interrupted"
    left.write_bytes(b"half")
    alone = store.root / "gone" / ".tmp-interrupted"
    alone.parent.mkdir()
    alone.write_bytes(b"half")
    os.utime(alone, (0, 0))
    os.utime(left)
    assert store.remove_leftovers("", older_than_key="data/absent") == 0
    assert [entry.key for entry in store.list()] == ["data/a"]
    assert store.remove_leftovers("", older_than_key="data/a") == 1
    assert left.exists()
    assert os.listdir(store.root) == ["data"]


def test_of_many_writers_one_wins_though_the_winner_sweeps(store: LocalStore) -> None:
    """What the others have written is older than the object, as leftovers are."""

    def claim(key: str, together: threading.Barrier) -> bool:
        together.wait()
        won = store.put_if_absent(key, b"x" * 1000)
        if won:
            store.remove_leftovers("", older_than_key=key)
        return won

    writers = 8
    with ThreadPoolExecutor(writers) as pool:
        for number in range(100):
            key, together = f"records/{number}", threading.Barrier(writers)
            found = list(pool.map(claim, [key] * writers, [together] * writers))
            assert sorted(found) == [False] * (writers - 1) + [True]


def test_a_link_whose_answer_was_lost_counts_as_ours(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def repeated(source: Path, target: Path) -> None:  # as NFS does
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", repeated)
    assert store.put_if_absent("key", b"mine")
    assert not store.put_if_absent("key", b"other")
    assert store.get("key") == b"mine"


def test_a_file_system_without_links_is_named(store: LocalStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(StoreError, match=r"\blinks\b"):
        store.put_if_absent("key", b"x")
    assert list(store.list()) == []


def test_age_is_the_time_since_the_file_was_written(store: LocalStore) -> None:
    store.put("lease/a", b"x")
    an_hour_ago = (store.root / "lease/a").stat().st_mtime - 3600
    os.utime(store.root / "lease/a", (an_hour_ago, an_hour_ago))
    assert store.age("lease/a") == pytest.approx(3600, abs=10)
    assert os.listdir(store.root / "lease") == ["a"]
    store.put("lease/a", b"again")
    assert store.age("lease/a") == pytest.approx(0, abs=10)
