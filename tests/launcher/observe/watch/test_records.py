"""Records are read once, as they come, and what is known is what a fresh look finds, whatever happens to the run."""

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.store.errors import StoreError
from data_service.store.local import LocalStore
from data_service.store.open import open_store
from launcher.observe.inspect.report.figures import Account
from launcher.observe.watch.records import RECENT, LiveRecords
from launcher.runtime.run.segments import EVENTS, METRICS, pack, pack_key, segment_key
from tests.support.runs.untrained import ToldRun

FIELDS = ("loss", "mlm_loss", "lr", "tokens_per_second", "odd_loss")
DEEDS = st.lists(
    st.one_of(
        st.tuples(st.just("steps"), st.integers(1, 60)),
        st.tuples(st.just("evaluation"), st.just(0)),
        st.tuples(st.just("resume"), st.integers(0, 90)),
        st.tuples(st.just("pack"), st.integers(1, 5)),
        st.tuples(st.just("garbage"), st.just(0)),
        st.tuples(st.just("late"), st.just(0)),
        st.tuples(st.just("look"), st.just(0)),
    ),
    max_size=14,
)


class Running:
    """A run, and what a random deed does to it."""

    def __init__(self, folder: Path) -> None:
        self.run, self.folder = ToldRun(folder), folder
        self.attempt, self.step, self.draw = 1, 0, np.random.default_rng(5)
        self.run.begin(1)

    def do(self, what: str, amount: int) -> None:
        match what:
            case "steps":
                extra = {"odd_loss": float(self.draw.normal())} if amount % 3 == 0 else {}
                self.run.steps(self.attempt, self.step, self.step + amount, **extra)
                self.step += amount
            case "evaluation":
                self.run.evaluation(self.attempt, self.step, float(self.draw.normal()))
            case "resume":
                self.attempt, self.step = self.attempt + 1, max(0, self.step - amount)
                self.run.begin(self.attempt, self.step)
            case "pack":
                self._pack(amount)
            case "garbage":
                self.run._segment(METRICS, self.attempt, [{"kind": "nonsense"}])
            case "late" if self.attempt > 1:
                self.run.steps(self.attempt - 1, self.step + 1, self.step + 3)

    def _pack(self, count: int) -> None:
        """The first segments of the newest attempt go into a pack."""
        folder = self.folder / METRICS / f"a{self.attempt:06d}"
        paths = sorted(folder.glob("*.jsonl"))[:count] if folder.exists() else []
        numbers = [int(path.stem) for path in paths]
        if not paths or numbers != list(range(numbers[0], numbers[0] + len(numbers))):
            return
        data = pack(numbers[0], [path.read_bytes() for path in paths], [path.name for path in paths])
        (self.folder / pack_key(METRICS, self.attempt, numbers[0], numbers[-1])).write_bytes(data)
        for path in paths:
            path.unlink()


def alike(one: Account, other: Account) -> None:
    assert one.summary.records == other.summary.records
    assert one.summary.reached == other.summary.reached
    for field in FIELDS:
        for axis in ("steps", "tokens", "hours"):
            pair = one.summary.curve(field, axis), other.summary.curve(field, axis)
            for name in ("x", "y", "low", "high"):
                first, second = (getattr(curve, name) for curve in pair)
                np.testing.assert_allclose(first, second, rtol=1e-9, err_msg=field)
    assert list(one.evaluations) == list(other.evaluations)
    assert list(one.events) == list(other.events)
    assert one.figures.tokens_per_second == other.figures.tokens_per_second
    assert one.figures.tokens == other.figures.tokens
    assert len(set(one.damage)) == len(set(other.damage))


@pytest.mark.long
@given(deeds=DEEDS)
@settings(max_examples=12, deadline=None)
def test_what_is_known_is_what_a_fresh_look_finds(deeds: list[tuple[str, int]]) -> None:
    with TemporaryDirectory() as folder:
        running = Running(Path(folder) / "run")
        store = open_store(running.folder)
        watcher = LiveRecords(store)
        for what, amount in [*deeds, ("look", 0)]:
            running.do(what, amount)
            if what == "look":
                watcher.update()
                fresh = LiveRecords(store)
                fresh.update()
                alike(watcher.account, fresh.account)
                assert list(watcher.recent.steps.numbers) == list(fresh.recent.steps.numbers)


def test_only_what_is_new_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ToldRun(tmp_path / "run")
    run.begin(1)
    for first in range(0, 300, 100):
        run.steps(1, first, first + 100)
    store = open_store(run.folder)
    records = LiveRecords(store)
    records.update()
    got: list[str] = []
    whole = type(store).get
    monkeypatch.setattr(type(store), "get", lambda self, key: got.append(key) or whole(self, key))
    records.update()
    assert got == []
    run.steps(1, 300, 310)
    records.update()
    assert got == [segment_key(METRICS, 1, 3)]
    assert records.account.summary.reached == 310


def test_a_look_that_fails_half_way_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = ToldRun(tmp_path / "run")
    run.begin(1)
    run.steps(1, 0, 10)
    run.begin(2, 10)
    records = LiveRecords(open_store(run.folder))
    whole, missing = LocalStore.get, [segment_key(EVENTS, 2, 0)]

    def get(self: LocalStore, key: str) -> bytes:
        if key in missing:
            raise StoreError("it does not answer", remedy="wait")
        return whole(self, key)

    monkeypatch.setattr(LocalStore, "get", get)
    with pytest.raises(StoreError):
        records.update()
    missing.clear()
    for _ in range(2):
        records.update()
        assert [event["attempt"] for event in records.account.events] == [1, 2]


def test_a_run_that_was_deleted_and_made_anew_is_read_anew(tmp_path: Path) -> None:
    import shutil

    run = ToldRun(tmp_path / "run")
    run.begin(1)
    run.steps(1, 0, 50)
    run.steps(1, 50, 80)
    records = LiveRecords(open_store(run.folder))
    records.update()
    shutil.rmtree(run.folder)
    again = ToldRun(run.folder)
    again.begin(1)
    again.steps(1, 0, 7)
    records.update()
    assert records.account.summary.reached == 7
    assert len(records.account.events) == 1


def test_what_is_kept_is_of_bounded_size_and_counts_every_step(tmp_path: Path) -> None:
    run = ToldRun(tmp_path / "run")
    records = LiveRecords(open_store(run.folder))
    for first in range(0, 6_000, 2_000):
        run.steps(1, first, first + 2_000)
        records.update()
        summary = records.account.summary
        assert summary.records == first + 2_000
        assert summary.total("tokens") == 1000.0 * summary.records
        assert len(summary.first) <= 2001
    assert len(records.recent.steps) == RECENT
