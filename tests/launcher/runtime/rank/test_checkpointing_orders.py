"""Starts, steps, saves, stops, kills and rewinds in any order: there is always a checkpoint to go on from, on the
history, or a run that has none yet and may start at its first step."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from checkpoints.attempt import claim
from checkpoints.gather import SingleRank
from checkpoints.layout import CheckpointManifest, CheckpointName
from checkpoints.listing import Rewind, checkpoint_rows, is_on_lineage, list_committed, read_rewinds, record_rewind
from checkpoints.load import CheckpointReader
from checkpoints.verify import find_newest_good
from data_service.store.base import Store
from data_service.store.open import open_store
from encoder_core.train.settings import MEMORY_KIND
from encoder_core.train.state import TrainState
from encoder_core.train.xlnet_memory import StoredMemory
from encoder_core.train.zero_state import Fragment
from launcher.runtime.run.record import COMMITTED_KEY
from tests.support.ranks.checkpointers import Engine, Silent, keeper_of
from tests.support.ranks.checkpointing import assert_holds, random_state

_GRID = 3  # steps from one refresh of the memory to the next
_REMEMBERED = "memory.0"

Order = tuple[str, int]
_ORDERS = st.one_of(
    st.tuples(st.just("steps"), st.integers(1, 4)),
    st.tuples(st.sampled_from(["begin", "commit", "stop", "kill", "start"]), st.just(0)),
    st.tuples(st.just("rewind"), st.integers(1, 3)),
)


class _Run:
    """A run whose command is repeated."""

    def __init__(self, store: Store, keep_last: int) -> None:
        self.store, self._keep_last = store, keep_last
        self.expected: int | None = None  # the step to go on from
        self._running = False
        self.start(0)

    def start(self, _: int) -> None:
        if self._running:
            return
        self._attempt = claim(self.store)
        good = find_newest_good(self.store, SingleRank())
        self._resumed = good.manifest if good else None
        self._state = replace(TrainState(), step=self._resumed.step if self._resumed else 0)
        self._keeper = keeper_of(self.store, self._attempt, Silent(), self._resumed, keep_last=self._keep_last)
        self._begun: int | None = None
        self._engine, self._running = Engine(), True

    def steps(self, count: int) -> None:
        if self._running:
            self._state = replace(self._state, step=self._state.step + count)
            self._engine.step = self._state.step

    def begin(self, _: int) -> None:
        fresh = self._running and self._begun is None and self._state.step > (self.expected or 0)
        if fresh and self._state.step % _GRID == 0:
            self._keeper.begin(self._engine, self._state)  # type: ignore[arg-type]
            self._begun = self._state.step

    def commit(self, _: int) -> None:
        if self._running and self._begun is not None:
            self._keeper.commit()
            self.expected, self._begun = self._begun, None

    def stop(self, _: int) -> None:
        """As the loop does it: memory is given where the next step would not recompute it."""
        if not self._running:
            return
        lane = Fragment(_REMEMBERED, 0, {MEMORY_KIND: random_state(0)["scale"]["master"]})
        carried = StoredMemory((lane,), {_REMEMBERED: (1,)}) if self._state.step % _GRID else StoredMemory()
        self._keeper.finish(self._engine, self._state, carried)  # type: ignore[arg-type]
        self.expected = self._state.step or None
        self._running = False

    def kill(self, _: int) -> None:
        self._running = False

    def rewind(self, back: int) -> None:
        """To one of the newest checkpoints of the history, as `SpikeGuard` chooses them."""
        past = self._resumed.lineage if self._resumed else ()
        own = [mark for mark in list_committed(self.store) if mark.attempt == self._attempt.number]
        history = own + [mark for mark in list_committed(self.store) if is_on_lineage(past, mark)]
        if not self._running or not history:
            return
        to = history[min(back, len(history)) - 1]
        number, step = self._attempt.number, self._state.step
        rewind = Rewind(attempt=number, to=to, began=step, reached=step + 1, cause="test", skips=())
        record_rewind(self.store, rewind, self._attempt)
        self.expected, self._running = to.step, False

    def check(self) -> None:
        good = find_newest_good(self.store, SingleRank())
        if self.expected is None:
            assert good is None
            assert self.store.size(COMMITTED_KEY) is None
            return
        assert good is not None
        assert good.passed_over == ()
        assert good.manifest.step == self.expected
        assert is_on_lineage(good.manifest.lineage, good.manifest.name)
        assert_holds(self.store, good.manifest, random_state(self.expected))
        self._check_memory(good.manifest)

    def _check_memory(self, manifest: CheckpointManifest) -> None:
        assert (_REMEMBERED in manifest.memory) == (manifest.step % _GRID != 0)
        if manifest.memory:
            with CheckpointReader(self.store, manifest) as reader:
                assert reader.read_full(_REMEMBERED, MEMORY_KIND).shape == (1,)


@pytest.mark.long
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(orders=st.lists(_ORDERS, max_size=14), keep_last=st.integers(1, 3))
@example(orders=[("stop", 0), ("start", 0), ("steps", 1), ("stop", 0)], keep_last=1)
@example(orders=[("stop", 0)] * 2 + [("start", 0), ("steps", 3), ("begin", 0), ("commit", 0)], keep_last=1)
@example(orders=[("steps", 4), ("stop", 0), ("start", 0), ("stop", 0), ("start", 0), ("kill", 0)], keep_last=1)
def test_in_any_order_there_is_a_way_on(
    tmp_path_factory: pytest.TempPathFactory, orders: list[Order], keep_last: int
) -> None:
    run = _Run(open_store(tmp_path_factory.mktemp("run")), keep_last)
    run.check()
    for name, number in orders:
        getattr(run, name)(number)
        run.check()


def test_a_checkpoint_before_the_first_step_is_on_its_history(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Runs stopped in their first start by earlier versions have one."""
    store = open_store(tmp_path_factory.mktemp("run"))
    run = _Run(store, keep_last=1)
    engine = Engine()
    run._keeper.begin(engine, TrainState())  # type: ignore[arg-type]
    run._keeper.commit()
    run.kill(0)
    assert [(row.step, row.abandoned) for row in checkpoint_rows(store)] == [(0, False)]
    run.expected = 0
    run.start(0)
    run.steps(2)
    run.stop(0)
    run.check()
    assert list_committed(store) == [CheckpointName(2, 2)]
    assert read_rewinds(store) == []
