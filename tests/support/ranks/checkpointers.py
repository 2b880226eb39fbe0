"""A run's keeper outside a run: with a journal that nobody reads, and nothing beside the trainer's state."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import ClassVar

from pydantic import JsonValue

from checkpoints.attempt import Attempt
from checkpoints.gather import Peers, SingleRank
from checkpoints.layout import CheckpointManifest
from checkpoints.load import CheckpointReader
from data_service.store.base import Store
from encoder_core.train.zero_state import Fragment
from launcher.runtime.rank.checkpointing import RunCheckpointer
from launcher.runtime.rank.journal import RankJournal
from launcher.runtime.rank.resume import ResumePoint
from launcher.runtime.rank.startup import StartupClock
from launcher.runtime.recipe.schema import Checkpointing, Interval
from tests.support.ranks.checkpointing import SHAPES, cut, random_state


class Silent:
    """A rank's line to nobody, which keeps what the rank said."""

    end_action = None

    def __init__(self) -> None:
        self.beats: list[tuple[int, str, int]] = []
        self.notes: list[str] = []
        self.events: list[tuple[str, Mapping[str, object]]] = []

    def beat(self, step: int, doing: str, done: int = 0) -> None:
        self.beats.append((step, doing, done))

    def record(self, record: dict[str, object]) -> None: ...
    def note(self, text: str) -> None:
        self.notes.append(text)

    def event(self, kind: str, fields: Mapping[str, object]) -> None:
        self.events.append((kind, fields))

    def stop_requested(self) -> bool:
        return False


class Nothing:
    """Nothing goes into a checkpoint beside the state."""

    def state(self) -> dict[str, JsonValue]:
        return {}

    def latest_rewind_step(self, step: int) -> int:
        return step


def keeper_of(
    store: Store,
    attempt: Attempt,
    link: Silent,
    resumed: CheckpointManifest | None = None,
    *,
    keep_last: int = 3,
    peers: Peers | None = None,
    every: Interval | None = None,
    save_multiple: int = 1,
    clock: Callable[[], float] = time.monotonic,
) -> RunCheckpointer:
    settings = Checkpointing(every=every or Interval(steps=10), keep_last=keep_last)
    journal = RankJournal(link, StartupClock(), None)
    return RunCheckpointer(
        store,
        attempt,
        peers or SingleRank(),
        settings=settings,
        journal=journal,
        extra=Nothing(),
        resumed=None if resumed is None else ResumePoint(resumed, _unread, resumed.step),
        save_multiple=save_multiple,
        clock=clock,
    )


def _unread() -> AbstractContextManager[CheckpointReader]:
    raise AssertionError("a checkpointer reads no state")


class Engine:
    """Its whole state, as the only rank, is a function of the steps done."""

    shapes = SHAPES
    own_kinds: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def __init__(self) -> None:
        self.step = 0

    def fragments(self) -> Iterator[Fragment]:
        return cut(random_state(self.step), (), 0)
