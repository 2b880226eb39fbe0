"""A run's keeper outside a run: with a journal that nobody reads, and nothing beside the trainer's state."""

from pydantic import JsonValue

from checkpoints.attempt import Attempt
from checkpoints.gather import Alone, Peers
from checkpoints.layout import Manifest
from data_service.store.base import Store
from launcher.keeper import RunKeeper
from launcher.rank_journal import RankJournal
from launcher.recipe import Checkpointing, Every
from launcher.startup import Startup


class Silent:
    """A line to nobody, which remembers where the rank said that it is."""

    def __init__(self) -> None:
        self.beats: list[tuple[int, str, int]] = []

    def beat(self, step: int, doing: str, done: int = 0) -> None:
        self.beats.append((step, doing, done))

    def record(self, record: dict[str, object]) -> None: ...
    def note(self, text: str) -> None: ...
    def stop_requested(self) -> bool:
        return False


class Nothing:
    """Nothing goes into a checkpoint beside the state."""

    def state(self) -> dict[str, JsonValue]:
        return {}

    def way_back(self, step: int) -> int:
        return step


def keeper_of(
    store: Store,
    attempt: Attempt,
    link: Silent,
    resumed: Manifest | None = None,
    *,
    keep_last: int = 3,
    peers: Peers | None = None,
) -> RunKeeper:
    settings = Checkpointing(every=Every(steps=10), keep_last=keep_last)
    journal = RankJournal(link, Startup(), None, None)
    return RunKeeper(store, attempt, peers or Alone(), settings, journal, Nothing(), resumed)
