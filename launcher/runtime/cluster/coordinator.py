"""The coordinator: one small Ray actor through which ranks and the driver talk while the run trains.

Ranks report that they are alive and how far they are. The driver asks for the state of the run, and passes requests to
stop on. The coordinator holds nothing that a run needs in order to continue: if it dies, the driver starts another one.
Calls to the store and to Ray run on separate threads, so that no other call waits for them; the lock is held only while
memory is changed.
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
from launcher.runtime.cluster.deaths import Deaths
from launcher.runtime.cluster.gauges import Gauges
from launcher.runtime.cluster.group_record import Group, Raised
from launcher.runtime.cluster.nodes import draining, on_thread, staying
from launcher.runtime.cluster.operator_log import OperatorLog
from launcher.runtime.cluster.orders import Fatal, Orders, Status
from launcher.runtime.cluster.run_claim import RunClaim
from launcher.runtime.cluster.world_size import Nodes, WorldSizeTracker
from launcher.runtime.policies.elastic import GroupStart, Sizing
from launcher.runtime.policies.failures import CROWDED, Failure, Kind, Restart, Stop
from launcher.runtime.policies.watchdog import RankLocation

_control = on_thread("control")  # may wait for the store or for Ray
_closing = on_thread("closing")


class Coordinator:
    """The coordinator's actor. The driver claims the first attempt; the coordinator claims the later ones in the
    driver's name, and renews the heartbeat of the newest attempt.

    Ranks of an earlier group may still be alive, for example behind a broken network. Ranks send the number of their
    attempt with every message, as soon as they know it, and messages of earlier attempts are ignored.

    Args:
        attempt: the attempt that the driver claimed for the first group.
        owner: the driver, in whose name attempts are claimed.
        sizing: the numbers of ranks that the run may have.
        last: number of ranks that wrote the newest checkpoint; None if there is none.
        failures: the failures of all starts of the run so far (`launcher.runtime.cluster.deaths`).
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
        self._tenure = RunClaim(attempt, owner)
        self._deaths = Deaths(failures)
        self._status, self._group = Status(), Group()
        self._stop = False
        self._frugal = False  # whether ranks must do with as little memory as they can
        self._in_memory = False  # the last state, which the last group did not save
        self._asked = False  # the driver has asked for a first group
        self._waits = False  # the operator knows that a start waits for the store
        self._over = 0  # the newest attempt whose group is over
        self._gauges = Gauges(attempt.store.uri)

    @_control
    def next_group(self, failed: Sequence[int]) -> GroupStart | None:
        """Return how many ranks the driver may start now, and without which nodes; None: not now, or never. Call it
        when the last group is over. `failed`: the ranks that ended that group, as far as Ray knows."""
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
            if self._is_superseded() or (self._stop and not self._in_memory):
                self._status.idle = True
                return None
            start = self._grant(there)
            if start is None and self._stop:  # nobody can save what is in memory
                self._status.idle, self._status.finished = True, None
            self._in_memory = self._in_memory and start is None
            return start

    def _forget_group(self) -> None:
        """Forget the last group before the next ranks report, so that its heartbeats and orders do not count for
        them."""
        self._over = self._status.attempt or 0
        self._status.paused = self._status.hands_over = False
        self._group = Group()

    def _grant(self, there: Nodes) -> GroupStart | None:
        ranks = self._world.start(there)
        if (text := self._world.news()) is not None:
            self.note(text)
        if ranks is None:
            return None
        self._group.granted, self._status.finished = True, None
        self._status.group += 1
        return GroupStart(ranks, self._world.without, self._frugal, self._status.group)

    @_control
    def look_around(self) -> None:
        """Pause the ranks at a checkpoint if a node of theirs is being drained, or if more could train. Called every
        few seconds."""
        going = draining()
        there = staying(going)
        with self._lock:
            if not self._group.running or self._status.paused:
                return
            ours = going & {beat.place.node for beat in self._group.beats.values()}
            if ours:
                names = ", ".join(sorted(node[:8] for node in ours))
                self._pause(f"nodes that ranks are on are being drained: {names}", "elsewhere", there)
            elif self._world.grows(there):
                self._pause("there is room for more ranks", "with them", there)

    def _pause(self, reason: str, how: str, there: Nodes) -> None:
        """Have the ranks end. They save the state, unless the next ones can start at once."""
        self._status.paused, self._status.hands_over = True, self._world.at_once(there)
        self.note(f"{reason}: {'' if self._status.hands_over else 'saving, to '}go on {how}")
        self._log.event("pause", reason=reason)

    @_control
    def unfit(self, preflights: Sequence[Mapping[str, Any]], problem: str, remedy: str) -> None:
        """Exclude the nodes that the preflight found unfit, because of `problem`. If too few nodes are left, end the
        run. `preflights`: the fields of the event of each unfit node."""
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
        """Let a group of ranks, which is ready on `nodes`, begin its attempt. Return the number of the attempt; None
        if the group must not train; or the store's error as text if the store does not answer. The ranks then ask
        again.

        `warnings`: warnings of the preflight, which are shown once a command.
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
        self, rank: int, step: int, doing: str, place: RankLocation, attempt: int | None = None, done: int = 0
    ) -> Orders:
        """Take in a heartbeat of a rank (`Beat`), and return the orders for the rank."""
        with self._lock:
            if self._is_over(attempt):
                return Orders()
            self._group.heard(rank, step, doing, done, place)
            if doing == "loading" and not self._group.resumed:
                self._resume(step)
            status, group = self._status, self._group
            return Orders(self._stop, status.paused, status.hands_over, group.asked(rank), group.broken)

    def rank_gone(self, group: int) -> None:
        """Note that a rank of group number `group` has ended, so that the others must leave."""
        with self._lock:
            if group == self._status.group and self._group.granted:
                self._group.broken = True

    def _resume(self, step: int) -> None:
        """Tell the operator from which step the ranks resume, once they have found the newest intact checkpoint."""
        again = self._deaths.resumed(step)
        self._group.resumed = True
        repeats = f", {again:,} steps are repeated" if again else ""
        self.note(f"loading the state of step {step:,}{repeats}")

    def stack(self, rank: int, text: str) -> None:
        """Take in a rank's answer to `Orders.stacks`: the tracebacks of its threads."""
        with self._lock:
            if self._group.stacks is not None:
                self._group.stacks[rank] = text

    def stacks(self) -> dict[int, str]:
        """Ask every rank for the tracebacks of its threads. Return those that have come since the first call, by
        rank."""
        with self._lock:
            self._group.stacks = self._group.stacks or {}
            return dict(self._group.stacks)

    def hung(self, what: str, culprits: Sequence[int], group: int) -> None:
        """Record that the driver is about to kill the stuck ranks of `group`, with the tracebacks that came.

        Args:
            what: which ranks are stuck and why, as text.
            culprits: the ranks that the others waited for; empty if unknown.
            group: number of the group, as in `Status`.
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
        """Show a line to the operator."""
        self._notes.append(text)  # without the lock: the recorder notes, too

    def event(self, kind: str, fields: Mapping[str, Any], attempt: int | None = None) -> None:
        """Record an event that one rank knows of, and show its `reason` to the operator. `fields` name the rank."""
        with self._lock:
            if not self._is_over(attempt):
                self._log.event(kind, of=attempt, **fields)
                self.note(f"rank {fields['rank']} on {fields['host']}: {fields['reason']}")

    def failed(
        self,
        rank: int,
        error: str,
        blamed: Sequence[int] | None = None,
        attempt: int | None = None,
        kind: Kind = "raised",
        trace: str = "",
    ) -> None:
        """Take in the error with which a rank ends (`Raised`). `blamed`: the ranks at fault according to the error,
        whichever rank raised it; empty if the error says that the fault cannot be located; None if it says nothing."""
        with self._lock:
            if self._is_over(attempt):
                return
            self._group.errors.setdefault(rank, Raised(error, kind, trace))
            self._group.blamed = blamed if blamed is not None else self._group.blamed

    def finish(self, step: int, attempt: int | None = None, *, saved: bool = True) -> None:
        """Note that the ranks ended in good order. `saved`: whether their last state is committed; if not, it is in
        memory, for the next group."""
        with self._lock:
            if not self._is_over(attempt):
                self._status.finished, self._group.running = step, False
                self._in_memory = not saved
                self._deaths.resumed(step)

    def unsaved(self, reason: str, attempt: int | None = None) -> None:
        """Note that the ranks ended as requested, but that their last save failed because of `reason`."""
        with self._lock:
            if not self._is_over(attempt):
                self._status.unsaved, self._group.running = reason, False

    def went_back(self, attempt: int | None = None) -> None:
        """Note that the ranks end in order to start again from an earlier checkpoint. This is not counted as a
        failure."""
        with self._lock:
            if not self._is_over(attempt):
                self._group.running, self._group.excused = False, True

    def superseded(self, problem: str, attempt: int | None = None) -> None:
        """Note that another start has taken the run over."""
        with self._lock:
            if not self._is_over(attempt) and not self._status.superseded:
                self._status.superseded, self._group.excused, self._group.running = True, True, False
                self.note(problem)

    def _is_superseded(self) -> bool:
        if self._tenure.taken:
            self.superseded("a newer start has taken the run over: this one ends")
        return self._status.superseded

    def fail(self, problem: str, remedy: str, attempt: int | None = None, repeated: bool = False) -> None:
        """Note that the run must end and why. Only the first call counts: later reasons are mostly consequences of the
        first on other ranks. `repeated`: as in `Fatal`."""
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
        """Record that the last group died, and follow the failure policy. If a stop was requested, the death is no
        failure."""
        group, number = self._group, self._status.attempt
        group.running = False
        failure = group.failure(failed, committed=self._deaths.committed, now=time.time())
        self.note(group.epitaph(failed) + ("" if self._stop else "; starting again"))
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
                self._economise(decision.frugal)
            case _:
                assert_never(decision)
        if not self._is_superseded():
            self._log.deaths(self._deaths.failures)

    def _economise(self, frugal: bool) -> None:
        """Say so, once, if the next ranks make no copies of their state and have no spare processes."""
        if frugal and not self._frugal:
            failures = self._deaths.failures
            step = max(each.step for each in failures if each.committed == failures[-1].committed)
            why = "without an error, perhaps for want of memory"
            reason = f"ranks died {CROWDED} times, at last after step {step:,}, {why}"
            self._log.event("memory_failed", step=step, reason=reason)
            self.note(f"{reason}: the next make no copies of the state and have no spare processes")
        self._frugal = frugal

    def status(self) -> Status:
        """Return a snapshot of the run's state. Each note is handed over once."""
        with self._lock:
            self._is_superseded()
            notes = [self._notes.popleft() for _ in range(len(self._notes))]
            beats, without = dict(self._group.beats), self._world.without
            return replace(self._status, notes=notes, beats=beats, without=without)

    @_closing
    def close(self, patience_s: float) -> bool:
        """Write what is still to be recorded when the command ends, in at most `patience_s` seconds. Return whether
        everything was written."""
        done = self._log.close(patience_s)
        self._tenure.close(0.5)
        return done


def start_coordinator(
    attempt: Attempt, owner: Owner, sizing: Sizing, last: int | None, failures: Sequence[Failure] = ()
) -> Any:
    """Start the coordinator on the driver's node, and return the actor's handle, which is also sent to the ranks. The
    arguments are those of `Coordinator`. If it dies, its ranks end by themselves: claim another attempt and start
    another coordinator."""
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    threads = {"control": 1, "closing": 1}
    actor = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups=threads)(Coordinator)
    return actor.options(scheduling_strategy=here).remote(attempt, owner, sizing, last, failures)
