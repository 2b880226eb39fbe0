"""Packs: nothing is lost and nothing is there twice, whoever packs, and wherever anything dies."""

import io
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow.parquet as pq
import pytest

from data_service.store.base import Entry, Store
from data_service.store.errors import StoreUnavailable
from data_service.store.local import LocalStore
from launcher.runtime.run.history import History, read_history
from launcher.runtime.run.log import RunLog, encode_line, evaluation_record
from launcher.runtime.run.packing import pack_once
from launcher.runtime.run.segments import (
    METRICS,
    DamagedPack,
    Pack,
    list_segments,
    pack_key,
    segment_key,
    segment_prefix,
)

WAIT_S = 30.0
T = TypeVar("T")


class Died(BaseException):
    """As a process does: nothing after it happens."""


@dataclass(frozen=True)
class Mortal(LocalStore):
    """A store that its user dies at, before or after an operation; and that others use between two of them."""

    lives: list[int] = field(default_factory=list)
    between: list[Callable[[], object]] = field(default_factory=list)
    one: threading.Lock = field(default_factory=threading.Lock)  # at a time

    def get(self, key: str) -> bytes:
        return self._do(lambda: super(Mortal, self).get(key))

    def put_if_absent(self, key: str, data: bytes | memoryview) -> bool:
        return self._do(lambda: super(Mortal, self).put_if_absent(key, data))

    def delete(self, key: str) -> None:
        return self._do(lambda: super(Mortal, self).delete(key))

    def list(self, prefix: str = "") -> Iterator[Entry]:
        for entry in super().list(prefix):
            self._tick()
            yield entry

    def _do(self, work: Callable[[], T]) -> T:
        self._tick()
        result = work()
        self._tick()
        return result

    def _tick(self) -> None:
        with self.one:
            if self.lives:
                self.lives[0] -= 1
                if self.lives[0] < 0:
                    raise Died
            if self.between:
                self.between.pop(0)()


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path)


def write(store: Store, attempt: int, number: int, first: int, steps: int = 3) -> None:
    lines = [
        {"kind": "step", "step": first + row, "loss": first + row + attempt / 10, "seconds": 1.0, "lr": 1e-3}
        for row in range(steps)
    ]
    records = [*lines, evaluation_record(first + steps, {"loss": 2.0, "mlm_loss": float(attempt)})]
    store.put(segment_key(METRICS, attempt, number), "".join(map(encode_line, records)).encode())


def write_all(store: Store, attempt: int, segments: int, begin: int = 0) -> None:
    for number in range(segments):
        write(store, attempt, number, begin + 3 * number)


def seen(history: History) -> tuple[object, ...]:
    columns = {name: history.steps.column(name).tolist() for name in sorted(history.steps.fields)}
    return columns, history.evaluations, history.repeated, history.repeated_seconds, history.damage


def names(store: Store, attempt: int = 1) -> list[str]:
    prefix = segment_prefix(METRICS, attempt)
    return [entry.key.removeprefix(prefix) for entry in store.list(prefix)]


def test_a_packed_history_is_the_same(store: LocalStore) -> None:
    write_all(store, 1, 10)
    write_all(store, 2, 4, begin=9)
    before = seen(read_history(store))
    assert before[2] == 21
    assert pack_once(store, 1, ended=True)
    assert not pack_once(store, 1, ended=True)
    assert names(store) == ["00000000-00000009.parquet"]
    assert seen(read_history(store)) == before
    assert pack_once(store, 2, ended=True)
    assert seen(read_history(store)) == before


def test_an_attempt_that_goes_on_is_packed_when_a_pack_is_full(store: LocalStore) -> None:
    write_all(store, 1, 7)
    while pack_once(store, 1, ended=False, most_segments=3):
        pass
    assert names(store) == ["00000000-00000002.parquet", "00000003-00000005.parquet", "00000006.jsonl"]
    assert read_history(store).steps.numbers.tolist() == list(range(21))


def test_a_pack_holds_the_segments_as_they_were_damage_included(store: LocalStore) -> None:
    write_all(store, 1, 3)
    key = segment_key(METRICS, 1, 1)
    store.put(key, b'{"kind": "st\n' + store.get(key) + b'{"kind":"step","step":5,"of tomorrow":[1]}')
    contents = [store.get(segment_key(METRICS, 1, number)) for number in range(3)]
    before = [line.rsplit("/", 1)[1] for line in read_history(store).damage]
    pack_once(store, 1, ended=True)
    (stretch,) = list_segments(store, f"{METRICS}/")[1]
    assert [data for _, data in Pack(store, stretch).segment_contents()] == contents
    after = [line.rsplit("/", 1)[1] for line in read_history(store).damage]
    assert after == before != []


@pytest.mark.parametrize("moment", range(36))
def test_dying_at_any_moment_loses_and_doubles_nothing(tmp_path: Path, moment: int) -> None:
    store = LocalStore(tmp_path)
    write_all(store, 1, 5)
    before = seen(read_history(store))
    with suppress(Died):
        pack_once(Mortal(tmp_path, lives=[moment]), 1, ended=True)
    assert seen(read_history(store)) == before
    while pack_once(store, 1, ended=True):
        pass
    assert seen(read_history(store)) == before
    assert names(store) == ["00000000-00000004.parquet"], "what was left is tidied up"


@pytest.mark.default_cases(6)
@pytest.mark.parametrize("seed", range(20))
def test_two_that_pack_a_zombie_that_writes_and_a_reader_at_once(tmp_path: Path, seed: int) -> None:
    """A reader sees all that was there when it began."""
    draw = random.Random(seed)
    store = LocalStore(tmp_path)
    write_all(store, 1, 6)
    written = [6]

    def zombie() -> None:
        write(store, 1, written[0], 3 * written[0])
        written[0] += 1

    def repeats() -> None:
        """A put whose answer was lost."""
        number = draw.randrange(written[0])
        write(store, 1, number, 3 * number)

    def other_packs() -> None:
        pack_once(store, 1, ended=True, most_segments=draw.choice([3, 4, 100]))

    def nothing() -> None: ...

    acts = [zombie, repeats, other_packs, nothing, nothing]
    for _ in range(6):
        begun = written[0]
        history = read_history(Mortal(tmp_path, between=[draw.choice(acts) for _ in range(8)]))
        assert history.steps.numbers.tolist()[: 3 * begun] == list(range(3 * begun))
        assert (history.repeated, history.damage) == (0, [])
        meddled = Mortal(tmp_path, between=[draw.choice(acts) for _ in range(12)])
        pack_once(meddled, 1, ended=draw.choice([True, False]), most_segments=draw.choice([2, 3, 100]))
    while pack_once(store, 1, ended=True):
        pass
    history = read_history(store)
    assert history.steps.numbers.tolist() == list(range(3 * written[0]))
    assert (history.repeated, history.damage) == (0, [])


def test_what_a_zombie_writes_late_is_read_and_counts_as_repeated(store: LocalStore) -> None:
    write_all(store, 1, 4)
    pack_once(store, 1, ended=True)
    write_all(store, 2, 2, begin=12)
    write(store, 1, 4, 12)
    history = read_history(store)
    assert history.steps.numbers.tolist() == list(range(18))
    assert history.steps.column("loss")[12:].tolist() == [step + 0.2 for step in range(12, 18)]
    assert history.repeated == 3


def test_a_new_attempt_packs_the_older_ones_and_in_the_long_run_itself(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.runtime.run.log._CHECK_SEGMENTS", 2)
    monkeypatch.setattr("launcher.runtime.run.packing.MAX_PACK_BYTES", 500)
    write_all(store, 1, 4)
    write_all(store, 2, 1)
    write_all(store, 3, 3)
    journal = RunLog(store, 4, flush_seconds=1000.0)
    for step in range(9, 21):
        journal.add_metrics({"kind": "step", "step": step, "loss": 1.0, "seconds": 1.0, "note": 200 * "x"})
        assert journal.flush(WAIT_S)
    tick, deadline = threading.Event(), time.monotonic() + WAIT_S
    while sum(name.endswith(".parquet") for name in names(store, 4)) < 2:
        assert time.monotonic() < deadline
        tick.wait(0.01)
    journal.close(WAIT_S)
    journal._packer._thread.join(WAIT_S)
    assert names(store, 1)[0].endswith(".parquet")
    assert names(store, 2) == ["00000000.jsonl"], "one object is one object"
    assert read_history(store).steps.numbers.tolist() == list(range(21))


def test_packing_that_fails_disturbs_nobody(tmp_path: Path) -> None:
    class Refusing(LocalStore):
        def put_if_absent(self, key: str, data: bytes | memoryview) -> bool:
            raise StoreUnavailable.for_uri(self.uri, "no answer")

    write_all(LocalStore(tmp_path), 1, 3)
    notes: list[str] = []
    journal = RunLog(Refusing(tmp_path), 2, flush_seconds=1000.0, note=notes.append)
    journal.add_metrics({"kind": "step", "step": 9})
    assert journal.close(WAIT_S)
    journal._packer._thread.join(WAIT_S)
    assert read_history(LocalStore(tmp_path)).steps.numbers.tolist() == [*range(9), 9]
    assert notes == []


@pytest.mark.parametrize("where", [0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99])
@pytest.mark.parametrize("how", ["cut", "garbled"])
def test_a_damaged_pack_is_told_and_the_rest_is_read(store: LocalStore, how: str, where: float) -> None:
    for number in range(4):
        write(store, 1, number, 200 * number, steps=200)
    pack_once(store, 1, ended=True)
    write(store, 1, 4, 800)
    key = pack_key(METRICS, 1, 0, 3)
    data = bytearray(store.get(key))
    at = int(where * len(data))
    if how == "cut":
        del data[at:]
    else:
        data[at : at + 40] = bytes(value ^ 0xFF for value in data[at : at + 40])
    store.put(key, bytes(data))
    history = read_history(store)
    columns = [history.steps.column(name) for name in ("loss", "lr", "seconds")]
    assert history.steps.numbers.tolist()[-3:] == [800, 801, 802]
    whole = len(history.steps) == 803 and all(np.isfinite(column).all() for column in columns)
    assert whole or f"{key} is damaged" in history.damage[0]
    assert how == "garbled" or not whole


@pytest.mark.parametrize("flips", [50, pytest.param(5000, marks=pytest.mark.long)])
def test_a_flipped_bit_is_told_or_changes_nothing(store: LocalStore, flips: int) -> None:
    write_all(store, 1, 4)
    pack_once(store, 1, ended=True)
    (stretch,) = list_segments(store, f"{METRICS}/")[1]
    whole, data, draw = seen(read_history(store)), store.get(stretch.key), random.Random(flips)
    contents = list(Pack(store, stretch).segment_contents())
    for bit in (draw.randrange(8 * len(data)) for _ in range(flips)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        store.put(stretch.key, bytes(flipped))
        history = read_history(store)
        *_, damage = found = seen(history)
        assert damage or found == whole, bit
        with suppress(DamagedPack):
            assert list(Pack(store, stretch).segment_contents()) == contents, bit


def test_a_store_that_is_away_is_no_damage(tmp_path: Path) -> None:
    class Away(LocalStore):
        def get_range(self, key: str, start: int, length: int) -> bytes:
            raise StoreUnavailable.for_uri(self.uri, "no answer")

    write_all(LocalStore(tmp_path), 1, 2)
    pack_once(LocalStore(tmp_path), 1, ended=True)
    with pytest.raises(StoreUnavailable):
        read_history(Away(tmp_path))


def test_a_pack_is_a_table_for_everyone(store: LocalStore) -> None:
    write_all(store, 1, 2)
    pack_once(store, 1, ended=True)
    found = pq.read_table(io.BytesIO(store.get(pack_key(METRICS, 1, 0, 1)))).to_pydict()
    assert found["step"] == [0, 1, 2, None, 3, 4, 5, None]
    assert found["in-segment"] == [0] * 4 + [1] * 4


def test_an_entry_with_another_name_is_nobodys(store: LocalStore) -> None:
    write_all(store, 1, 2)
    for name in ("notes.txt", "a000001/0.jsonl", "a000001/00000003.jsonl.bak", "b/00000000.jsonl"):
        store.put(f"{METRICS}/{name}", b"?")
    assert [entry.first for entry in list_segments(store, f"{METRICS}/")[1]] == [0, 1]
