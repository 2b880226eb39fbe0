"""A coordinator as a plain object, in a cluster of nodes of our own."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoints.attempt import Owner, claim
from data_service.store.local import LocalStore
from launcher.runtime.cluster.coordinator import Coordinator
from launcher.runtime.policies.elastic import Sizing
from launcher.runtime.policies.failures import Failure
from launcher.runtime.policies.watchdog import RankLocation
from launcher.runtime.run.history import read_history
from tests.support.stores.faulty import FaultyStore

ELASTIC = Sizing(least=1, most=3, expected=3, wait=0, grow=0, each={"CPU": 1})
FIXED = Sizing(least=2, most=2, expected=2, wait=0, grow=float("inf"), each={"CPU": 1})


class Cluster:
    """Nodes by name, and their cores."""

    def __init__(self, **cores: int) -> None:
        self.cores = cores
        self.draining: dict[str, int] = {}

    def nodes(self) -> list[dict[str, Any]]:
        return [
            {"NodeID": name, "Alive": True, "Resources": {"CPU": cores}} for name, cores in self.cores.items()
        ]


def faulty(folder: Path, failures: Sequence[Failure] = ()) -> tuple[Coordinator, FaultyStore]:
    """With a store that can hang or be away."""
    owner, store = Owner.here(time.time()), FaultyStore(folder / "run")
    return Coordinator(claim(store, owner=owner), owner, ELASTIC, None, failures), store


def state(
    folder: Path, sizing: Sizing, last: int | None = None, failures: Sequence[Failure] = ()
) -> Coordinator:
    owner, store = Owner.here(time.time()), LocalStore(folder)
    return Coordinator(claim(store, owner=owner), owner, sizing, last, failures)


def begin(state: Coordinator, *nodes: str) -> int:
    """A group comes together on these nodes and shows life."""
    number = state.enter(nodes)
    assert isinstance(number, int)
    for rank, node in enumerate(nodes):
        state.beat(rank, 7, "training", RankLocation(node, 100 + rank))
    return number


def events(folder: Path, state: Coordinator) -> list[tuple[Any, ...]]:
    assert state.close(10)
    found = read_history(LocalStore(folder)).events
    return [(e["kind"], e.get("from"), e.get("to")) for e in found if e["kind"] in ("world", "pause")]
