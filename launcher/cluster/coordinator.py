"""The coordinator: one small Ray actor through which ranks and the driver talk beside the training itself.

Ranks report that they are alive and how far they are; the driver asks how the run stands and says when to stop.
It holds nothing a run needs to continue: if it dies, another one is started. Nobody who shows life or asks waits for
a store or for Ray: what touches either has threads of its own, and the lock is held for work in memory only.
"""

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, assert_never

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from checkpoints.attempt import Attempt, Owner
from checkpoints.errors import RunIsActive
from data_service.store.errors import TRANSIENT
from launcher.cluster.deaths import Deaths
from launcher.cluster.gauges import Gauges
from launcher.cluster.group_record import Group, Raised
from launcher.cluster.nodes import draining, on_thread, staying
from launcher.cluster.operator_log import OperatorLog
from launcher.cluster.standing import Fatal, Orders, Status
from launcher.cluster.tenure import Tenure
from launcher.cluster.world_size import Nodes, WorldSizeTracker
from launcher.policies.elastic import GroupStart, Sizing
from launcher.policies.failures import Failure, Kind, Restart, Stop
from launcher.policies.watchdog import RankProcess

_control = on_thread("control")  # may wait for the store or for Ray
_closing = on_thread("closing")


class Coordinator:
    """The actor's body. It claims the attempts after the first, in the driver's name, and beats for the newest.

    Ranks of a group that is over may still live: cut off with their machine, they do not know. They say which
    `attempt` they belong to, once they know it, and are not listened to.

    Args:
        attempt: claimed for the first group.
        owner: the driver.
        last: ranks that wrote the newest checkpoint, None if there is none.
        failures: of all starts of the run so far (`launcher.cluster.deaths`).
    """

    def __init__(
        self,
        attempt: Attempt,
        owner: Owner,
        sizing: Sizing,
        last: int | None,
        failures: Sequence[Failure] = (),
    ) -> None:
        self._world = WorldSizeTracker(sizing, last)
        self._lock = threading.RLock()
        self._notes: deque[str] = deque()
        self._log = OperatorLog(attempt.store, self.note)
        self._tenure = Tenure(attempt, owner)
        self._deaths = Deaths(failures)
        self._status, self._group = Status(), Group()
        self._stop = False
        self._asked = False  # the driver has asked for a first group
        self._waits = False  # the operator knows that a start waits for the store
        self._over = 0  # the newest attempt whose group is over
        self._gauges = Gauges(attempt.store.uri)

    @_control
    def next_group(self, failed: Sequence[int]) -> GroupStart | None:
        """The driver can start ranks: how many, and where. None for now, or for good. The last group is over,
        ended by the ranks in `failed`, as far as Ray knows.
        """
        there = staying(draining())
        with self._lock:
            # Ranks may die before they are let in, too.
            if self._group.died(failed):
                self._judge(failed, there)
            elif not self._asked and self._deaths.failures:
                self._follow_policy(there)
            self._asked = True
            self._forget_group()
            if self._status.fatal is not None:
                return None
            if self._stop or self._is_superseded():
                self._status.idle = True
                return None
            return self._grant(there)

    def _forget_group(self) -> None:
        """Before the next ranks give signs of life: nothing is left of the last group, and no order is for them."""
        self._over = self._status.attempt or 0
        self._status.paused = False
        self._group = Group()

    def _grant(self, there: Nodes) -> GroupStart | None:
        ranks = self._world.start(there)
        if (text := self._world.news()) is not None:
            self.note(text)
        if ranks is None:
            return None
        self._group.granted, self._status.finished = True, None
        self._status.group += 1
        return GroupStart(ranks, self._world.without)

    @_control
    def look_around(self) -> None:
        """Have the ranks end at a checkpoint if a node of theirs is to go, or if more could train. The driver
        asks for this now and then while they run."""
        going = draining()
        there = staying(going)
        with self._lock:
            if not self._group.running or self._status.paused:
                return
            ours = going & {beat.place.node for beat in self._group.beats.values()}
            if ours:
                names = ", ".join(sorted(node[:8] for node in ours))
                self._pause(
                    f"nodes that ranks are on are being drained: {names}", "saving, to go on elsewhere"
                )
            elif self._world.grows(there):
                self._pause("there is room for more ranks", "saving, to go on with them")

    def _pause(self, reason: str, what: str) -> None:
        self._status.paused = True
        self.note(f"{reason}: {what}")
        self._log.event("pause", reason=reason)

    @_control
    def unfit(self, preflights: Sequence[Mapping[str, Any]], problem: str, remedy: str) -> None:
        """Nodes of a group that was to start must not train, for `problem`: others are taken, or the run ends.

        `preflights`: of each such node, the fields of its event.
        """
        there = staying(draining())
        bad = frozenset(preflight["node"] for preflight in preflights)
        with self._lock:
            self._group.excused = True
            if self._world.leave_out(there, bad):
                self.note(f"left out: {problem} ({remedy})")
            else:
                self.fail(problem, remedy)
            for preflight in preflights:
                self._log.event("unfit", **preflight)

    @_control
    def enter(self, nodes: Sequence[str], warnings: Sequence[str] = ()) -> int | str | None:
        """A group of ranks starts, on these nodes: the number of its attempt. None if no start can help; a text, what
        the store says, if it does not let us claim: ask again.

        `warnings`, of its preflight, are shown once a command.
        """
        if self._status.fatal is not None:
            return None
        try:
            attempt = self._tenure.next()
        except TRANSIENT as error:
            if not self._waits:
                self.note(f"the ranks wait for the store: {error.problem}")
            self._waits = True
            return error.problem
        except RunIsActive as error:
            self.superseded(error.problem)
            return None
        with self._lock:
            self._waits = False
            self._status.starts += 1
            self._gauges.started(self._status.starts)
            if self._status.starts == 1:
                self._notes += warnings
            self._status.attempt = attempt.number
            self._group.running = True
            self._record_world(len(nodes))
        return attempt.number

    def _is_over(self, attempt: int | None) -> bool:
        return attempt is not None and attempt <= self._over

    def beat(
        self, rank: int, step: int, doing: str, place: RankProcess, attempt: int | None = None, done: int = 0
    ) -> Orders:
        """A sign of life, as of `Beat`."""
        with self._lock:
            if self._is_over(attempt):
                return Orders(stop=False, pause=False, stacks=False)
            self._group.heard(rank, step, doing, done, place)
            if doing == "loading" and not self._group.resumed:
                self._resume(step)
            return Orders(self._stop, self._status.paused, self._group.asked(rank))

    def _resume(self, step: int) -> None:
        """The ranks have found the newest checkpoint that verifies."""
        again = self._deaths.resumed(step)
        self._group.resumed = True
        repeats = f", {again:,} steps are repeated" if again else ""
        self.note(f"loading the checkpoint of step {step:,}{repeats}")

    def stack(self, rank: int, text: str) -> None:
        """A rank's answer."""
        with self._lock:
            if self._group.stacks is not None:
                self._group.stacks[rank] = text

    def stacks(self) -> dict[int, str]:
        """What every rank's threads do, of those that have answered since this was first asked."""
        with self._lock:
            self._group.stacks = self._group.stacks or {}
            return dict(self._group.stacks)

    def hung(self, what: str, culprits: Sequence[int], group: int) -> None:
        """The ranks are about to be killed, because they are stuck: `what` goes on record, and their stacks.

        `culprits`: those that the others waited for; empty if nobody can tell. `group`: as of `Status`.
        """
        with self._lock:
            if group == self._status.group:
                self._group.hung, self._group.blamed = True, list(culprits)
                number = self._status.attempt if self._group.running else None
                self._log.hang(number, what, self._group)

    def record(self, record: dict[str, Any], attempt: int | None = None) -> None:
        with self._lock:
            if self._is_over(attempt):
                return
            self._gauges.record(record)
            if record["kind"] == "evaluation":
                self._status.evaluation = record
                return
            self._status.record, self._group.worked = record, True

    def note(self, text: str) -> None:
        """A line for the operator."""
        self._notes.append(text)  # without the lock: the recorder notes, too

    def failed(
        self,
        rank: int,
        error: str,
        blamed: Sequence[int] | None = None,
        attempt: int | None = None,
        kind: Kind = "raised",
        trace: str = "",
    ) -> None:
        """A rank ends with an error, as of `Raised`. `blamed`: the ranks whose fault it was, whoever raised it, if the
        error tells; empty if it tells that nobody knows."""
        with self._lock:
            if self._is_over(attempt):
                return
            self._group.errors.setdefault(rank, Raised(error, kind, trace))
            self._group.blamed = blamed if blamed is not None else self._group.blamed

    def finish(self, step: int, attempt: int | None = None) -> None:
        with self._lock:
            if not self._is_over(attempt):
                self._status.finished, self._group.running = step, False
                self._deaths.resumed(step)

    def unsaved(self, reason: str, attempt: int | None = None) -> None:
        """A stop was asked for, and the ranks end, but could not save."""
        with self._lock:
            if not self._is_over(attempt):
                self._status.unsaved, self._group.running = reason, False

    def went_back(self, attempt: int | None = None) -> None:
        """The ranks end, to start again from an earlier checkpoint: nobody's failure, and nothing to judge."""
        with self._lock:
            if not self._is_over(attempt):
                self._group.running, self._group.excused = False, True

    def superseded(self, problem: str, attempt: int | None = None) -> None:
        """Somebody else has taken the run over."""
        with self._lock:
            if not self._is_over(attempt) and not self._status.superseded:
                self._status.superseded, self._group.excused, self._group.running = True, True, False
                self.note(problem)

    def _is_superseded(self) -> bool:
        if self._tenure.taken:
            self.superseded("a newer start has taken the run over: this one ends")
        return self._status.superseded

    def fail(self, problem: str, remedy: str, attempt: int | None = None, repeated: bool = False) -> None:
        """Keep the first; later ones are usually its consequences on other ranks."""
        with self._lock:
            if self._status.fatal is None and not self._is_over(attempt):
                self._status.fatal = Fatal(problem, remedy, repeated)

    def stop(self) -> None:
        self._stop = True

    def _record_world(self, world: int) -> None:
        change = self._world.entered(world)
        if change is not None:
            self.note(f"{world} ranks instead of {change.before}: {change.cause}")
            self._log.event("world", **{"from": change.before, "to": world, "cause": change.cause})

    def _judge(self, failed: Sequence[int], there: Nodes) -> None:
        """The last group died: what the policy makes of that. Whoever was asked to stop has not failed."""
        group, number = self._group, self._status.attempt
        group.running = False
        failure = group.failure(failed, committed=self._deaths.committed, now=time.time())
        self.note(group.epitaph(failed) + ("" if self._stop else "; starting again from the last checkpoint"))
        self._log.death(number, failure, failed, group)
        if not self._stop:
            self._deaths.add(failure)
            self._follow_policy(there)

    def _follow_policy(self, there: Nodes) -> None:
        decision = self._deaths.decide(nodes=len(there))
        match decision:
            case Stop():
                self.fail(decision.reason, decision.remedy, repeated=True)
            case Restart():
                self._world.leave_out(there, decision.without)
            case _:
                assert_never(decision)
        if not self._is_superseded():
            self._log.deaths(self._deaths.failures)

    def status(self) -> Status:
        """A snapshot; notes are handed over once."""
        with self._lock:
            self._is_superseded()
            notes = [self._notes.popleft() for _ in range(len(self._notes))]
            beats, without = dict(self._group.beats), self._world.without
            return replace(self._status, notes=notes, beats=beats, without=without)

    @_closing
    def close(self, patience_s: float) -> bool:
        """The command ends: put what waits on record, in `patience_s` seconds at most. Whether all of it is."""
        done = self._log.close(patience_s)
        self._tenure.close(0.5)
        return done


def start_coordinator(
    attempt: Attempt, owner: Owner, sizing: Sizing, last: int | None, failures: Sequence[Failure] = ()
) -> Any:
    """A handle that travels to the ranks. Lives on the driver's node. Arguments as of `Coordinator`. If it dies, claim
    another attempt and start another: its ranks end by themselves."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    threads = {"control": 1, "closing": 1}
    actor = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups=threads)(Coordinator)
    return actor.options(scheduling_strategy=here).remote(attempt, owner, sizing, last, failures)
