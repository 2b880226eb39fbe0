"""The driver's loop over groups of ranks: it starts one group after another until the run is over, shows progress, and
kills ranks that are stuck."""

import time
from dataclasses import replace
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError

from launcher.errors import TryAgain
from launcher.runtime.cluster.assignment import Assignment
from launcher.runtime.cluster.nodes import lost
from launcher.runtime.cluster.orders import CoordinatorLost, Status
from launcher.runtime.cluster.rank_group import RankGroup
from launcher.runtime.cluster.rank_pool import RankPool
from launcher.runtime.cluster.stuck_ranks import StuckRankKiller
from launcher.runtime.policies.elastic import GroupStart, Sizing
from launcher.runtime.run.record import Run

_POLL_S = 0.25
_ASK_S = 0.5  # interval at which the coordinator is asked whether ranks may start
_ROOM_INTERVAL_S = 5.0  # interval at which it is asked whether the ranks should make room for more
_ANSWER_S = 10.0  # time limit of one answer of the coordinator
_COORDINATOR_TIMEOUT_S = 120.0  # time without an answer after which the coordinator counts as dead
_END_S = 30.0  # time that ranks have to end once they are done
NOT_SAVED = "the steps done since the last checkpoint are lost"


class Display(Protocol):
    """An object that shows a run to its operator."""

    def update(self, status: Status) -> None: ...
    def note(self, text: str) -> None: ...


class GroupLoop:
    """A loop that starts group after group of ranks, as long as one coordinator lives.

    Attributes:
        status: the last answer of the coordinator.
    """

    def __init__(self, run: Run, coordinator: Any, display: Display) -> None:
        self.status = Status()
        self._uri = run.store.uri
        self._steps, self._recovery = run.recipe.total_steps, run.recipe.recovery
        self._coordinator, self._display = coordinator, display
        self._killer = StuckRankKiller(run, coordinator, display.note)
        self._heard = self._looked = time.monotonic()

    def ranks(self, assignment: Assignment, sizing: Sizing) -> None:
        """Run groups of ranks until the run is complete, or no further group may start; `status` tells which.

        Raises:
            CoordinatorLost: if the coordinator is dead or silent; start another one.
            TryAgain: if Ray itself has died on this machine.
        """
        failed: list[int] = []
        with RankPool(self._uri, sizing, self._recovery) as pool:
            while (start := self._next(failed)) is not None:
                with RankGroup(start, pool) as group:
                    self._stay(group, assignment, pool)
                assignment = replace(assignment, before={})
                failed = group.failed
                self._look()

    def _next(self, failed: list[int]) -> GroupStart | None:
        """Wait until a group of ranks may start, and return how; None if no further group may start."""
        room = self._made_room()
        while not self._over(room):
            start: GroupStart | None = self._ask(self._coordinator.next_group.remote(failed))
            self._look()
            if start is not None:
                return start
            failed = []
            time.sleep(_ASK_S)  # machines that come do not announce themselves
        return None

    def _stay(self, group: RankGroup, assignment: Assignment, pool: RankPool) -> None:
        """Follow one group until it has ended. Errors of processes whose ranks had finished are ignored.

        Spare processes are made after the group's first step: its start needs the cores, and may compile the layers
        that they load.
        """
        before, done = self.status.record, None
        for _ in group.live(assignment, _POLL_S):
            self._look()
            self._killer.check(self.status)
            if self._look_around() and self.status.record != before:
                pool.refill()
            if self.status.fatal is not None or self.status.superseded:
                return
            if self.status.finished is not None or self.status.unsaved is not None:
                done = done or time.monotonic()
                if time.monotonic() - done > _END_S:
                    return

    def _made_room(self) -> bool:
        """Return whether the ranks ended in good order but early, so that another group could take their place."""
        status = self.status
        return status.paused and status.finished is not None and status.finished < self._steps

    def _over(self, room: bool) -> bool:
        """Return whether no further group may start. `room`: the last group ended in order to make room."""
        status = self.status
        if status.fatal is not None or status.idle or status.superseded or status.unsaved is not None:
            return True
        return status.finished is not None and not room

    def _look(self) -> None:
        dead = lost()
        if dead is not None:
            raise TryAgain(f"Ray is lost: its {dead} has died", remedy=NOT_SAVED)
        status = self._ask(self._coordinator.status.remote())
        if status is None:
            return
        self.status = status
        for text in status.notes:
            self._display.note(text)
        self._display.update(status)

    def _look_around(self) -> bool:
        """Ask the coordinator to look at the machines, if it is time. Return whether it was."""
        if time.monotonic() - self._looked < _ROOM_INTERVAL_S:
            return False
        self._looked = time.monotonic()
        self._coordinator.look_around.remote()
        return True

    def _ask(self, answer: Any) -> Any:
        """Return the coordinator's answer; None if it does not come in time, which happens on a busy machine."""
        try:
            found = ray.get(answer, timeout=_ANSWER_S)
        except GetTimeoutError:
            if time.monotonic() - self._heard > _COORDINATOR_TIMEOUT_S:
                raise CoordinatorLost("the coordinator does not answer") from None
            return None
        except RayActorError as error:
            raise CoordinatorLost("the coordinator's process died") from error
        self._heard = time.monotonic()
        return found
