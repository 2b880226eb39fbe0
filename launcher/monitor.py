"""The monitor: one small Ray actor through which ranks and the driver talk beside the training itself.

Ranks report that they are alive and how far they are; the driver asks how the run stands and says when to stop.
It holds nothing a run needs to continue: if it dies with its node, the next start has a new one.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, assert_never

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from checkpoints.attempt import Attempt, Heartbeat, Owner, claim
from data_service.store.errors import StoreError
from launcher.elastic import Sizing, Start, spared
from launcher.gauges import Gauges
from launcher.metrics import operator_event
from launcher.nodes import draining, staying
from launcher.policy import Failure, Restart, Stop, decide, where_it_began
from launcher.roster import Roster
from launcher.watchdog import Beat, Place


@dataclass(frozen=True)
class Fatal:
    """A mistake no restart can cure: what is wrong, and what to do."""

    problem: str
    remedy: str


@dataclass(frozen=True)
class Orders:
    """What a rank hears in answer to a sign of life: end after this step; end at the next step at which a checkpoint
    may be; send what every thread is doing."""

    stop: bool
    pause: bool
    stacks: bool


@dataclass
class Status:
    """What the driver shows and decides on.

    Attributes:
        starts: times a worker group began.
        attempt: the attempt number of the present worker group.
        beats: per rank, its last sign of life.
        record: the newest step record.
        evaluation: the newest evaluation record.
        finished: the step at which all ranks ended in good order, None while they run.
        without: nodes that no rank may be on any more.
        paused: the ranks are to end at a checkpoint, or have done so, for others to go on from there.
        idle: no rank runs and none will: a stop was asked for while they were to start.
        fatal: set once; the worker group must not be restarted.
    """

    starts: int = 0
    attempt: int | None = None
    beats: dict[int, Beat] = field(default_factory=dict)
    record: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    notes: list[str] = field(default_factory=list)
    finished: int | None = None
    without: frozenset[str] = frozenset()
    paused: bool = False
    idle: bool = False
    fatal: Fatal | None = None


class MonitorState:
    """The actor's body. It claims the attempts after the first, in the driver's name, and beats for the newest.

    Ranks of a group that is over may still live: cut off with their machine, they do not know. They say which
    `attempt` they belong to, once they know it, and are not listened to.
    """

    def __init__(self, attempt: Attempt, owner: Owner, sizing: Sizing, last: int | None) -> None:
        self._sizing, self._roster = sizing, Roster(sizing, last)
        self._store, self._owner = attempt.store, owner
        self._first: Attempt | None = attempt
        self._heart = Heartbeat(attempt)
        self._heart.__enter__()  # machines may have to be waited for
        self._status = Status()
        self._stop = False
        self._stacks: dict[int, str] | None = None  # None while nobody wants them
        self._failures: list[Failure] = []
        self._errors: dict[int, str] = {}  # by rank, of the present group, in the order in which they came
        self._blamed: Sequence[int] | None = None
        self._running = False  # a group was let in, and its end is not judged yet
        self._granted = False  # a group may start, and whether it came to its end is not known yet
        self._excused = False  # it ends by raising, and yet nobody failed
        self._over = 0  # the newest attempt whose group is over
        self._worked = False  # it has finished a step
        self._gauges = Gauges(attempt.store.uri)

    def next_group(self, failed: Sequence[int]) -> Start | None:
        """Ray can start ranks: how many, and where. None for now, or for good. The last group is over, ended by the
        ranks in `failed`, as far as Ray knows.
        """
        # Ranks may die before they are let in, too; while others are waited for, Ray names them again and again.
        if self._running or (self._granted and failed and not self._excused):
            self._judge(failed)
        self._forget_group()
        if self._status.fatal is not None:
            return None
        if self._stop:
            self._status.idle = True
            return None
        ranks = self._roster.start(staying(draining()), self._status.without)
        if (text := self._roster.waiting()) is not None:
            self.note(text)
        if ranks is None:
            return None
        self._granted = True
        return Start(ranks, self._status.without)

    def _forget_group(self) -> None:
        """Before the next ranks give signs of life: nothing is left of the last group, and no order is for them."""
        self._over = self._status.attempt or 0
        self._status.paused = self._worked = self._excused = self._granted = False
        self._status.beats.clear()
        self._errors.clear()
        self._blamed = None

    def look_around(self) -> None:
        """Have the ranks end at a checkpoint if a node of theirs is to go, or if more could train. Ray asks for this
        now and then while they run."""
        if not self._running or self._status.paused:
            return
        going = draining()
        ours = going & {beat.place.node for beat in self._status.beats.values()}
        if ours:
            names = ", ".join(sorted(node[:8] for node in ours))
            self._pause(f"nodes that ranks are on are being drained: {names}", "saving, to go on elsewhere")
        elif self._roster.grows(staying(going), self._status.without):
            self._pause("there is room for more ranks", "saving, to go on with them")

    def _pause(self, reason: str, what: str) -> None:
        self._status.paused = True
        self.note(f"{reason}: {what}")
        self._event("pause", reason=reason)

    def unfit(self, preflights: Sequence[Mapping[str, Any]], problem: str, remedy: str) -> None:
        """Nodes of a group that was to start must not train, for `problem`: others are taken, or the run ends.

        `preflights`: of each such node, the fields of its event.
        """
        self._excused = True
        bad = frozenset(preflight["node"] for preflight in preflights)
        without = spared(staying(draining()), self._sizing, self._status.without, bad)
        if bad <= without:
            self._status.without = without
            self.note(f"left out: {problem} ({remedy})")
        else:
            self.fail(problem, remedy)
        for preflight in preflights:
            self._event("unfit", **preflight)

    def enter(self, nodes: Sequence[str], warnings: Sequence[str] = ()) -> int | None:
        """A group of ranks starts, on these nodes: the number of its attempt. None if no start can help.

        `warnings`, of its preflight, are shown once a command.
        """
        if self._status.fatal is not None:
            return None
        attempt = self._next_attempt()
        self._status.starts += 1
        self._gauges.started(self._status.starts)
        if self._status.starts == 1:
            self._status.notes += warnings
        self._status.attempt = attempt.number
        self._running, self._stacks = True, None
        self._status.finished = None
        self._record_world(len(nodes))
        return attempt.number

    def _next_attempt(self) -> Attempt:
        attempt, self._first = self._first, None
        if attempt is None:
            attempt = claim(self._store, owner=self._owner)
            self._heart.__exit__()
            self._heart = Heartbeat(attempt)
            self._heart.__enter__()
        return attempt

    def _is_over(self, attempt: int | None) -> bool:
        return attempt is not None and attempt <= self._over

    def beat(self, rank: int, step: int, doing: str, place: Place, attempt: int | None = None) -> Orders:
        """A sign of life."""
        if self._is_over(attempt):
            return Orders(stop=False, pause=False, stacks=False)
        now, last = time.time(), self._status.beats.get(rank)
        known = last is not None and last.place == place
        self._status.beats[rank] = (
            last.again(step, doing, now) if last is not None and known else Beat(step, doing, now, now, place)
        )
        return Orders(self._stop, self._status.paused, self._stacks is not None and rank not in self._stacks)

    def want_stacks(self) -> None:
        """From now on, ask every rank what its threads are doing."""
        self._stacks = {}

    def stack(self, rank: int, text: str) -> None:
        """A rank's answer."""
        if self._stacks is not None:
            self._stacks[rank] = text

    def stacks(self) -> dict[int, str]:
        """The answers so far."""
        return dict(self._stacks or {})

    def record(self, record: dict[str, Any], attempt: int | None = None) -> None:
        if self._is_over(attempt):
            return
        self._gauges.record(record)
        if record["kind"] == "evaluation":
            self._status.evaluation = record
        else:
            self._status.record = record
            self._worked = True

    def note(self, text: str) -> None:
        """A line for the operator."""
        self._status.notes.append(text)

    def failed(
        self, rank: int, error: str, blamed: Sequence[int] | None = None, attempt: int | None = None
    ) -> None:
        """A rank raised. The first is usually the cause; but a rank that dies without a word makes others raise.

        `blamed`: the ranks whose fault it was, if the error tells, whoever raised it; empty if it tells that nobody
        knows.
        """
        if self._is_over(attempt):
            return
        self._errors.setdefault(rank, error)
        self._blamed = blamed if blamed is not None else self._blamed

    def finish(self, step: int, attempt: int | None = None) -> None:
        if self._is_over(attempt):
            return
        self._status.finished, self._running = step, False

    def went_back(self, attempt: int | None = None) -> None:
        """The ranks end, to start again from an earlier checkpoint: nobody's failure, and nothing to judge."""
        if self._is_over(attempt):
            return
        self._running, self._excused = False, True

    def fail(self, problem: str, remedy: str, attempt: int | None = None) -> None:
        """Keep the first; later ones are usually its consequences on other ranks."""
        if self._status.fatal is None and not self._is_over(attempt):
            self._status.fatal = Fatal(problem, remedy)

    def stop(self) -> None:
        self._stop = True

    def _record_world(self, world: int) -> None:
        change = self._roster.entered(world)
        if change is not None:
            self.note(f"{world} ranks instead of {change.before}: {change.cause}")
            self._event("world", **{"from": change.before, "to": world, "cause": change.cause})

    def _record_death(self, failure: Failure, failed: Sequence[int]) -> None:
        """As known: a group may die before it was let in, and so without an attempt of its own."""
        about = {"of": self._status.attempt, "step": failure.step, "ranks": sorted(failed)}
        self._event("death", **about, node=failure.node, reason=failure.error)

    def _event(self, kind: str, **fields: object) -> None:
        """On record, if the store lets us: what it is about goes on without."""
        try:
            operator_event(self._store, kind, time.time(), **fields)
        except StoreError as error:
            self.note(f"the event {kind} is not on record: {error.problem}")

    def _judge(self, failed: Sequence[int]) -> None:
        """The last group died: what the policy makes of that."""
        self._running = False
        beats = self._status.beats
        places = {rank: beat.place.node for rank, beat in beats.items()}
        silent = any(rank not in self._errors for rank in failed)  # the others' errors are what came of that
        failure = Failure(
            time=time.time(),
            step=max((beat.step for beat in beats.values()), default=0),
            worked=self._worked,
            node=where_it_began(places, self._errors, failed, self._blamed),
            error=None if silent else next(iter(self._errors.values()), None),
        )
        self._failures.append(failure)
        self._record_death(failure, failed)
        nodes = staying(draining())
        decision = decide(self._failures, nodes=len(nodes))
        match decision:
            case Stop():
                self.fail(decision.reason, decision.remedy)
            case Restart():
                self._status.without = spared(nodes, self._sizing, self._status.without, decision.without)
            case _:
                assert_never(decision)

    def status(self) -> Status:
        """A snapshot; notes are handed over once."""
        snapshot = self._status
        self._status = Status(**{**vars(snapshot), "notes": [], "beats": dict(snapshot.beats)})
        return snapshot


def start_monitor(attempt: Attempt, owner: Owner, sizing: Sizing, last: int | None) -> Any:
    """A handle that travels to the ranks. Lives as long as the driver, and on its node: others may come and go.

    `last`: ranks that wrote the newest checkpoint, None if there is none.
    """
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(MonitorState).options(num_cpus=0, max_restarts=0, scheduling_strategy=here)
    return actor.remote(attempt, owner, sizing, last)
