"""The last save of a run: it shows that it goes on, on every rank, and whether a store that failed may come back."""

import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from checkpoints.attempt import claim
from checkpoints.errors import CheckpointError, SaveFailed
from checkpoints.gather import Peers
from checkpoints.layout import CheckpointName
from checkpoints.listing import list_committed
from data_service.store.base import Store
from data_service.store.errors import (
    TRANSIENT_ERRORS,
    AccessDenied,
    CredentialsExpired,
    OutOfSpace,
    StoreError,
    StoreUnavailable,
)
from data_service.store.open import open_store
from encoder_core.train.state import TrainState
from encoder_core.train.xlnet_memory import StoredMemory
from encoder_core.train.zero_state import Fragment
from launcher.runtime.run.record import COMMITTED_KEY
from tests.support.ranks.checkpointers import Engine, Silent, keeper_of
from tests.support.ranks.checkpointing import on_threads


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "run")


def state_at(step: int) -> TrainState:
    return replace(TrainState(), step=step)


class _Uploading:
    """A store whose uploads are as `upload` has it, before they are made."""

    def __init__(self, store: Store, upload: Callable[[Callable[[int], None]], None]) -> None:
        self._store, self._upload = store, upload

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)

    def put_buffers(self, key: str, buffers: Sequence[memoryview], sent: Callable[[int], None] | None = None) -> None:
        assert sent is not None
        self._upload(sent)
        self._store.put_buffers(key, buffers, sent)


class _Hearing(Silent):
    """A line that tells of progress to `heard`."""

    def __init__(self, heard: Callable[[int], None]) -> None:
        super().__init__()
        self._heard = heard

    def beat(self, step: int, doing: str, done: int = 0) -> None:
        super().beat(step, doing, done)
        self._heard(done)


def test_a_long_last_upload_shows_progress_on_every_rank(store: Store) -> None:
    """Of two ranks the second uploads for as long as the first, which has long been ready, has not heard of it."""
    attempt, heard = claim(store), threading.Event()
    links: dict[int, Silent] = {}

    def slow(sent: Callable[[int], None]) -> None:
        sent(1_000_000)
        assert heard.wait(60)

    def work(peers: Peers) -> None:
        mine = store if peers.rank == 0 else _Uploading(store, slow)
        link = _Hearing(lambda done: heard.set() if done >= 1_000_000 and peers.rank == 0 else None)
        links[peers.rank] = link
        engine = Engine()
        if peers.rank:
            engine.fragments = lambda: iter(list[Fragment]())  # type: ignore[method-assign]
        keeper = keeper_of(mine, attempt, link, peers=peers)  # type: ignore[arg-type]
        keeper.finish(engine, state_at(3), StoredMemory())  # type: ignore[arg-type]

    on_threads(2, work)
    assert list_committed(store) == [CheckpointName(1, 3)]
    for link in links.values():
        assert {(step, doing) for step, doing, _ in link.beats} <= {(3, "saving"), (3, "tidying")}
        assert link.beats[0] == (3, "saving", 0)
        assert max(done for _, _, done in link.beats) >= 1_000_000


def test_so_does_the_wait_for_a_save_that_was_under_way(store: Store) -> None:
    attempt, heard = claim(store), threading.Event()

    def slow(sent: Callable[[int], None]) -> None:
        sent(1_000_000)
        assert heard.wait(60)

    link = _Hearing(lambda done: heard.set() if done >= 1_000_000 else None)
    keeper = keeper_of(_Uploading(store, slow), attempt, link)  # type: ignore[arg-type]
    keeper.begin(Engine(), state_at(3))  # type: ignore[arg-type]
    keeper.finish(Engine(), state_at(4), StoredMemory())  # type: ignore[arg-type]
    assert list_committed(store) == [CheckpointName(1, 4), CheckpointName(1, 3)]
    assert store.size(COMMITTED_KEY) is not None


@pytest.mark.parametrize(
    ("errors", "transient"),
    [
        ((StoreUnavailable.for_uri("s3://b", "down"), None), True),
        ((StoreUnavailable.for_uri("s3://b", "down"), CredentialsExpired.for_uri("s3://b", "token")), True),
        ((None, OutOfSpace.for_uri("s3://b", "quota")), True),
        ((StoreUnavailable.for_uri("s3://b", "down"), OutOfSpace.for_uri("s3://b", "quota")), True),
        ((None, AccessDenied.for_uri("s3://b", "rights")), False),
        ((StoreUnavailable.for_uri("s3://b", "down"), AccessDenied.for_uri("s3://b", "rights")), False),
    ],
)
def test_a_last_save_that_fails_says_whether_it_may_be_only_the_store(
    store: Store, errors: Sequence[StoreError | None], transient: bool
) -> None:
    attempt = claim(store)

    def work(peers: Peers) -> str:
        failing = False

        def upload(sent: Callable[[int], None]) -> None:
            error = errors[peers.rank]
            if failing and error is not None:
                raise error

        engine = Engine()
        if peers.rank:
            engine.fragments = lambda: iter(list[Fragment]())  # type: ignore[method-assign]
        keeper = keeper_of(_Uploading(store, upload), attempt, Silent(), peers=peers)  # type: ignore[arg-type]
        keeper.begin(engine, state_at(3))  # type: ignore[arg-type]
        keeper.commit()
        failing = True
        with pytest.raises(SaveFailed if transient else CheckpointError) as caught:
            keeper.finish(engine, state_at(9), StoredMemory())  # type: ignore[arg-type]
        if isinstance(caught.value, SaveFailed):
            assert (caught.value.step, caught.value.last) == (9, 3)
            assert re.search(r"\bsince step 3\b", caught.value.problem)
        assert isinstance(caught.value, TRANSIENT_ERRORS) == transient
        return str(caught.value)

    assert len(set(on_threads(2, work))) == 1
    assert list_committed(store) == [CheckpointName(1, 3)]


def test_a_store_that_fails_after_a_commit_costs_no_rank(store: Store) -> None:
    """Deleting what has expired is not what training is there for."""

    class Failing(_Uploading):
        def list(self, prefix: str = "") -> object:
            raise StoreUnavailable.for_uri("s3://b", "down")

        def put_if_absent(self, key: str, data: bytes) -> bool:
            if key == COMMITTED_KEY:
                raise StoreUnavailable.for_uri("s3://b", "down")
            return self._store.put_if_absent(key, data)

    keeper = keeper_of(Failing(store, lambda sent: None), claim(store), Silent())  # type: ignore[arg-type]
    for step in (3, 6):
        keeper.begin(Engine(), state_at(step))  # type: ignore[arg-type]
        keeper.commit()
    keeper.finish(Engine(), state_at(6), StoredMemory())  # type: ignore[arg-type]
    assert list_committed(store) == [CheckpointName(1, 6), CheckpointName(1, 3)]
