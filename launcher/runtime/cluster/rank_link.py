"""A rank's connection to the coordinator: heartbeats one way, orders the other."""

import logging
import os
import socket
import threading
from collections.abc import Mapping
from typing import Any

import ray

from data_service.service.gauges import StoreRetries
from encoder_core.train.groups import abort_groups, groups_failed, times_left
from encoder_core.train.loop import HANDED_OVER
from launcher.runtime.cluster.orders import CoordinatorLost, Orders
from launcher.runtime.policies.watchdog import RankLocation, beat_interval, stack_of_every_thread
from launcher.runtime.rank.journal import Ending

_GRACE_S = 60.0  # time without a coordinator and without progress after which a rank ends its process


def here() -> RankLocation:
    """Return the location of this process, a Ray worker."""
    return RankLocation(ray.get_runtime_context().get_node_id(), os.getpid(), socket.gethostname())


class RayLink:
    """The rank's connection to the coordinator. A separate thread sends the heartbeats, so that a rank that waits in a
    collective still reports where it is, and is freed from it if another rank is gone.

    If the coordinator dies, the rank ends at its next step. If it makes no progress either, it ends its process after
    `_GRACE_S` seconds, since nobody else would.

    Attributes:
        attempt: number of the rank's attempt; None until it is known.
        peer_gone: whether another rank is gone, so that the groups of this process were aborted.
    """

    def __init__(self, coordinator: Any, rank: int, save_multiple: int, world: int = 1) -> None:
        self._coordinator, self.rank, self._save_multiple = coordinator, rank, save_multiple
        self._interval = beat_interval(world)
        self.attempt: int | None = None
        self.peer_gone, self._left = False, times_left()
        self._where = (0, "starting", 0)
        self._stop, self._pause, self._hand_over = (threading.Event() for _ in range(3))
        self._lost, self._closed = threading.Event(), threading.Event()
        self._retries = StoreRetries()
        self._thread = threading.Thread(target=self._run, name="beat", daemon=True)
        self._thread.start()

    def beat(self, step: int, doing: str, done: int = 0) -> None:
        """Set the content of the next heartbeats: step, activity, and the progress within a long activity (`Beat`)."""
        self._where = (step, doing, done)
        if (doing, done, self.rank) == ("loading", 0, 0):  # a quick group may be over at the next heartbeat
            self._coordinator.beat.remote(self.rank, step, doing, here(), self.attempt, done)

    def record(self, record: dict[str, Any]) -> None:
        self._coordinator.record.remote(record, self.attempt)

    def note(self, text: str) -> None:
        self._coordinator.note.remote(text)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._coordinator.event.remote(kind, {**fields, "rank": self.rank, "host": here().host}, self.attempt)

    def stop_requested(self) -> bool:
        """Return whether the rank must end before its next step. Rank 0 alone decides when the state is handed over,
        since it decides on copies. Raises CoordinatorLost if the coordinator is gone."""
        if self._lost.is_set():
            raise CoordinatorLost("the coordinator is gone")
        ending, here = self.ends, self._where[0] % self._save_multiple == 0
        paused = ending == "save" or (ending == "hand over" and self.rank == 0)
        return self._stop.is_set() or (paused and here)

    @property
    def ends(self) -> Ending | None:
        """What the rank, if it has been asked to end, does with the last state."""
        if not (self._stop.is_set() or self._pause.is_set()):
            return None
        return "hand over" if self._hand_over.is_set() and not self._stop.is_set() else "save"

    @property
    def handed_over(self) -> bool:
        """Whether the rank has left its last state in memory alone."""
        return self._where[1] == HANDED_OVER

    @property
    def ending(self) -> bool:
        """Whether the rank is making its last save after a stop was requested."""
        return self._stop.is_set() and self._where[1] == "saving"

    def close(self) -> None:
        """Stop the heartbeats. Do not wait for a coordinator that does not answer."""
        self._closed.set()
        self._thread.join(1.0)

    def _run(self) -> None:
        place = here()
        while not self._closed.wait(self._interval):
            self._retries.update()
            try:
                self._show_life(place)
            except ray.exceptions.ActorUnavailableError:  # it may be back
                logging.getLogger(__name__).warning("the coordinator does not answer")
            except ray.exceptions.RayError:
                self._leave()

    def _show_life(self, place: RankLocation) -> None:
        step, doing, done = self._where
        orders: Orders = ray.get(
            self._coordinator.beat.remote(self.rank, step, doing, place, self.attempt, done)
        )
        if orders.stop:
            self._stop.set()
        if orders.hand_over:
            self._hand_over.set()
        if orders.pause:
            self._pause.set()
        if orders.stacks:
            self._coordinator.stack.remote(self.rank, stack_of_every_thread())
        if orders.abort or groups_failed():
            self.peer_gone = True
            abort_groups(self._left)

    def _leave(self) -> None:
        """Wait until the rank has ended; end the process if it makes no progress for `_GRACE_S` seconds."""
        self._lost.set()
        before = None
        while not self._closed.wait(_GRACE_S) and before != self._where:
            before = self._where
        if not self._closed.is_set():
            os._exit(1)
