"""The driver's loop over a run's ranks. It starts one group of ranks after another until the run is over, sends orders
to them, handles their news and the way each rank ended, and decides what follows.

    what happens                            the loop
    a request to stop                       orders the ranks to stop: they save, and their calls return
    a signal before a group's first step    kills the ranks; after a minute if in-memory copies may be unsaved
    a node is drained, or nodes are added   orders a pause: the ranks save, or leave the state in memory for others
    a rank dies or fails                    aborts the collectives of the others, records it, follows the failure policy
    ranks make no progress, or are silent   asks for tracebacks, and kills all ranks
    another start has taken the run over    kills the ranks
    all ranks have joined a group           claims an attempt (the right to write), however long the store takes

The loop keeps no state that a later start needs. If the driver dies, its ranks die too.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from checkpoints.errors import RunIsActive
from launcher.errors import TransientRunError
from launcher.exit_codes import REPEAT
from launcher.runtime.cluster.display import Gauges, ProgressDisplay
from launcher.runtime.cluster.group_record import GroupRecord
from launcher.runtime.cluster.nodes import dead_process, draining_node_ids, nodes_except
from launcher.runtime.cluster.operator_log import FailureHistory, OperatorLog
from launcher.runtime.cluster.orders import (
    Assignment,
    EndedUnsaved,
    FatalError,
    FinishedTraining,
    JoinedGroup,
    RankError,
    RankNews,
    RankResult,
    RestartFromEarlierState,
    RunTakenOver,
    UnfitNodes,
)
from launcher.runtime.cluster.rank_group import RankGroup, kill_ranks, stuck_text
from launcher.runtime.cluster.rank_pool import RankPool
from launcher.runtime.cluster.resources import Nodes, WorldSizeTracker
from launcher.runtime.cluster.run_claim import RunClaim
from launcher.runtime.cluster.stop_requests import StopRequests
from launcher.runtime.policies.elastic import GroupStart, Sizing
from launcher.runtime.policies.failures import SILENT_DEATH_LIMIT, Failure, RestartDecision, StopDecision
from launcher.runtime.policies.watchdog import HeartbeatObserver, find_culprits
from launcher.runtime.run.record import Run

_POLL_S = 0.25  # interval of the loop while a group of ranks runs
_PLACEMENT_POLL_S = 0.5  # interval of checks whether ranks that wait for machines can start
_RESIZE_CHECK_INTERVAL_S = 5.0  # interval of checks whether a node is drained, or more ranks fit
_STACKS_TIMEOUT_S = 5.0  # time limit for collecting the tracebacks of stuck ranks
_END_TIMEOUT_S = 30.0  # time limit for the other ranks to end once rank 0 has ended
_MEMORY_GRACE_S = 60.0  # time after a signal to load and save an in-memory state (Slurm signals 180 s before its limit)
UNSAVED_STEPS_REMEDY = "the steps done since the last checkpoint are lost"


@dataclass
class LoopOutcome:
    """How the loop ended.

    Attributes:
        finished: the step at which the last group ended without an error; None if it failed or never trained.
        unsaved: why the last checkpoint could not be saved after a request to stop; None if there was no such error.
        taken_over: whether another start has claimed a newer attempt of the run.
        fatal: why the run cannot continue; None if it can.
    """

    finished: int | None = None
    unsaved: str | None = None
    taken_over: bool = False
    fatal: FatalError | None = None


class ControlLoop:
    """The loop over the groups of ranks of one run (module docstring).

    Args:
        run: the run.
        claim: the command's claim on it.
        sizing: limits of the number of ranks.
        last: number of ranks that wrote the newest checkpoint; None if there is none.
        failures: the failures of all starts of the run so far (`launcher.runtime.cluster.operator_log`).
        display, log: show progress to the operator, and record events.
        stopping: the requests to stop.

    Attributes:
        group: the present group of ranks.
        end: how the loop ended; updated as groups end.
    """

    def __init__(
        self,
        run: Run,
        claim: RunClaim,
        sizing: Sizing,
        last: int | None,
        failures: Sequence[Failure],
        *,
        display: ProgressDisplay,
        log: OperatorLog,
        stopping: StopRequests,
    ) -> None:
        self._uri, self._steps = run.store.uri, run.recipe.total_steps
        self._limits, self._recovery = run.recipe.watchdog, run.recipe.recovery
        self._claim, self._sizing, self._log, self._stopping = claim, sizing, log, stopping
        self._display, self._gauges = display, Gauges(run.store.uri)
        self._world, self._deaths = WorldSizeTracker(sizing, last), FailureHistory(failures)
        self._observer = HeartbeatObserver()
        self.group, self._number, self._starts = GroupRecord(), 0, 0
        self._pauses = False  # whether the present group was ordered to pause
        self._hands_over = False  # whether the paused group leaves its state in memory for the next group
        self._in_memory = False  # whether the last group left its state in memory without saving it
        self._has_worked = False  # whether an earlier group may have left in-memory copies newer than any checkpoint
        self._frugal = False  # whether ranks save memory (`RestartDecision.frugal`)
        self._looked, self._signalled_at = time.monotonic(), float("inf")  # last check of the nodes, first signal
        self.end = LoopOutcome()

    def run(self, assignment: Assignment) -> LoopOutcome:
        """Run groups of ranks until the run is complete, or no further group may start. Raises TransientRunError if
        Ray itself has died on this machine."""
        if self._deaths.failures:
            self.apply_failure_policy(nodes_except(draining_node_ids()))
        with RankPool(self._uri, self._sizing, self._recovery) as pool:
            while (start := self.next_group()) is not None:
                with RankGroup(start, pool) as group:
                    self._run_group(group, assignment, pool)
                    self._take_all_news(group.last_news() if dead_process() is None else ())
                    self.handle_group_end(group.ends, group.failed)
                assignment = replace(assignment, before={})
        return self.end

    def next_group(self) -> GroupStart | None:
        """Wait until a group of ranks can start, and return its size and limits; None if the loop is over."""
        while not self._is_over():
            _ensure_ray()
            if self._stopping.asked.is_set() and not self._in_memory:
                return None
            there = nodes_except(draining_node_ids())
            ranks = self._world.ranks_to_start(there)
            if (text := self._world.start_message()) is not None:
                self._display.note(text)
            if ranks is not None:
                self._number += 1
                self._has_worked = self._has_worked or self.group.worked or self._in_memory
                self.group, self._in_memory, self.end.finished = GroupRecord(), False, None
                self._pauses = self._hands_over = False
                return GroupStart(ranks, self._world.without, self._frugal, self._number)
            if self._stopping.asked.is_set():  # too few machines to save the in-memory state
                self.end.finished = None
                return None
            time.sleep(_PLACEMENT_POLL_S)  # polls, because Ray does not announce new nodes
        return None

    def _is_over(self) -> bool:
        end = self.end
        if end.fatal is not None or self._is_taken_over() or end.unsaved is not None:
            return True
        return end.finished is not None and not (self._pauses and end.finished < self._steps)

    def _run_group(self, group: RankGroup, assignment: Assignment, pool: RankPool) -> None:
        """Supervise one group until it has ended, or must be killed.

        Spare processes are started after the group's first step: until then its ranks need the cores, and may still
        compile the layers that spare processes load.
        """
        for _ in group.join(assignment, _POLL_S):
            if self.supervise_group(group):
                return
        if not group.joined or not self.claim_attempt(group):
            return
        done = None
        for _ in group.train(self.group.attempt or 0, _POLL_S):
            if self.supervise_group(group):
                return
            if time.monotonic() - self._looked >= _RESIZE_CHECK_INTERVAL_S:
                self._looked = time.monotonic()
                self.pause_if_nodes_changed()
                if self.group.worked:
                    pool.start_missing_spares()
            if group.done:
                done = done or time.monotonic()
                if time.monotonic() - done > _END_TIMEOUT_S:
                    return

    def supervise_group(self, group: RankGroup) -> bool:
        """Send orders, handle news, kill stuck ranks. Return whether the group must end now."""
        _ensure_ray()
        group.orders = replace(
            group.orders,
            stop=self._stopping.asked.is_set(),
            pause=self._pauses,
            hand_over=self._hands_over,
        )
        self._take_all_news(group.talk())
        if self._is_taken_over():
            kill_ranks([beat.place for beat in self.group.beats.values()])
            return True
        self.group.abandoned = self._ends_before_first_step(group)
        if self.group.abandoned:
            self._display.note("no step has been done yet, so the ranks are killed without saving")
            return True
        self._observer.observe(self.group.beats, group.started_ranks)
        found = self._observer.find_stuck_ranks(self._limits) if not (self.group.hung or group.done) else []
        if found:
            what = stuck_text(found)
            self._display.note(f"ranks are stuck; all ranks are killed and started again: {what}")
            self.group.hung, self.group.blamed = True, find_culprits(found, self.group.beats)
            self._request_stacks(group)
            self._log.record_hang(what, self.group)
            kill_ranks([beat.place for beat in self.group.beats.values()])
        return any(stuck.rank not in self.group.beats for stuck in found)  # their pids are unknown: end the group

    def _ends_before_first_step(self, group: RankGroup) -> bool:
        """Return whether to kill the group because a signal came before its first step: it has nothing to save. If
        in-memory copies may be newer than any checkpoint, it gets `_MEMORY_GRACE_S` to load and save them."""
        if not self._stopping.asked.is_set() or self._stopping.code != REPEAT:
            return False
        self._signalled_at = min(self._signalled_at, time.monotonic())
        ends_by_itself = self.group.may_save or group.done or bool(group.failed)
        grace = _MEMORY_GRACE_S if self._has_worked else 0.0
        return not ends_by_itself and time.monotonic() - self._signalled_at >= grace

    def _request_stacks(self, group: RankGroup) -> None:
        group.orders = replace(group.orders, stacks=True)
        deadline = time.monotonic() + _STACKS_TIMEOUT_S
        while time.monotonic() < deadline and self.group.stacks.keys() < self.group.beats.keys():
            self._take_all_news(group.talk())
            time.sleep(_POLL_S)

    def claim_attempt(self, group: RankGroup) -> bool:
        """Claim an attempt for the joined group; retry until the store answers. Return whether the group may train."""
        try:
            for attempt in self._claim.claim_with_retries(self._display.note, _POLL_S):
                self._take_all_news(group.talk())
                self.group.attempt = attempt.number if attempt is not None else None
                if attempt is None and self._stopping.asked.is_set():
                    return False
        except RunIsActive as error:
            self._record_takeover(error.problem)
            return False
        self._starts += 1
        self._gauges.count_start(self._starts)
        first = next((end.outcome for rank, end in group.ends.items() if rank == 0), None)
        if self._starts == 1 and isinstance(first, JoinedGroup):
            for text in first.warnings:
                self._display.note(text)
        self._record_world_size(len(group.ends))
        return True

    def _record_world_size(self, world: int) -> None:
        change = self._world.record_world_size(world)
        if change is not None:
            self._display.note(f"{world} ranks train instead of {change.before}: {change.cause}")
            self._log.event("world", **{"from": change.before, "to": world, "cause": change.cause})

    def _take_all_news(self, answers: Sequence[tuple[int, RankNews]]) -> None:
        for rank, news in answers:
            self.take_rank_news(rank, news)

    def take_rank_news(self, rank: int, news: RankNews) -> None:
        """Handle the news of one rank: heartbeat, traceback, notes, events, and records of steps and evaluations."""
        self.group.beats[rank] = news.beat
        if news.stack is not None:
            self.group.stacks[rank] = news.stack
        if news.resumed is not None and not self.group.resumed:
            self._announce_resume(news.resumed)
        for text in news.notes:
            self._display.note(text)
        for kind, fields in news.events:
            self._log.event(kind, of=self.group.attempt, **fields)
            self._display.note(f"rank {fields['rank']} on {fields['host']}: {fields['reason']}")
        for record in news.records:
            self.group.worked = self.group.worked or record["kind"] == "step"
            self._gauges.record(record)
            self._display.record(record)
        if rank == min(self.group.beats):
            self._display.show_activity(news.beat.doing)

    def _announce_resume(self, step: int) -> None:
        """Tell the operator from which step the ranks resume, once they have found an intact state."""
        again = self._deaths.note_resume(step)
        self.group.resumed = True
        repeats = f", {again:,} steps are repeated" if again else ""
        self._display.note(f"loading the state of step {step:,}{repeats}")

    def pause_if_nodes_changed(self) -> None:
        """Order the ranks to pause if one of their nodes is being drained, or if more ranks could train."""
        if self._pauses:
            return
        going = draining_node_ids()
        there = nodes_except(going)
        places = {beat.place for beat in self.group.beats.values()}
        if ours := sorted({f"{place.node[:8]} ({place.host})" for place in places if place.node in going}):
            self._pause_group(f"nodes of these ranks are being drained: {', '.join(ours)}", "on other nodes", there)
        elif self._world.should_grow(there):
            self._pause_group("there is room for more ranks", "with them", there)

    def _pause_group(self, reason: str, continuation: str, nodes: Nodes) -> None:
        """Order the ranks to end so that another group can continue. They save the state, unless the next group can
        start at once and read it from memory."""
        self._pauses, self._hands_over = True, self._world.can_start_now(nodes)
        self._display.note(f"{reason}: {'' if self._hands_over else 'saving, then '}training continues {continuation}")
        self._log.event("pause", reason=reason)

    def handle_group_end(self, end_by_rank: Mapping[int, RankResult], failed_ranks: Sequence[int]) -> None:
        """Handle the end of a group. `end_by_rank`: results of the ranks that returned. `failed_ranks`: the ranks whose
        failure ended the group, as far as Ray knows."""
        excused = self.group.abandoned
        for rank, end in end_by_rank.items():
            match end.outcome:
                case RankError() as error:
                    self.group.add_error(rank, error)
                case FatalError() as fatal:
                    self.end.fatal = self.end.fatal or fatal
                case RunTakenOver(problem):
                    self._record_takeover(problem)
                case EndedUnsaved(reason):
                    self.end.unsaved = reason
                case UnfitNodes() as unfit:
                    if not excused:
                        self._exclude_nodes(unfit)
                    excused = True
                case RestartFromEarlierState():
                    excused = True
                case FinishedTraining(step, saved):
                    if rank == 0:
                        self.end.finished, self._in_memory, excused = step, not saved, True
                        self._deaths.note_resume(step)
                case JoinedGroup():
                    pass
                case outcome:
                    assert_never(outcome)
        began = self.group.attempt is not None or self.group.errors or failed_ranks or self.group.hung
        if began and not excused and not self._is_over():
            self._handle_group_death(failed_ranks)

    def _exclude_nodes(self, unfit: UnfitNodes) -> None:
        """Exclude the nodes that the preflight found unfit. If too few nodes are left, the run ends."""
        bad = frozenset(preflight["node"] for preflight in unfit.preflights)
        if self._world.exclude_nodes(nodes_except(draining_node_ids()), bad):
            self._display.note(f"nodes are excluded: {unfit.problem} ({unfit.remedy})")
        else:
            self.end.fatal = self.end.fatal or FatalError(unfit.problem, unfit.remedy)
        for preflight in unfit.preflights:
            self._log.event("unfit", **preflight)

    def _is_taken_over(self) -> bool:
        if self._claim.is_superseded:
            self._record_takeover("a newer start has taken the run over: this one ends")
        return self.end.taken_over

    def _record_takeover(self, problem: str) -> None:
        if not self.end.taken_over:
            self.end.taken_over = True
            self._display.note(problem)

    def _handle_group_death(self, failed_ranks: Sequence[int]) -> None:
        """Record that the group died, and follow the failure policy. After a request to stop, the death is not counted
        as a failure."""
        group, stopped = self.group, self._stopping.asked.is_set()
        failure = group.to_failure(failed_ranks, committed=self._deaths.committed, now=time.time())
        self._display.note(group.death_text(failed_ranks) + ("" if stopped else "; starting again"))
        self._log.record_death(failure, failed_ranks, group)
        if not stopped:
            self._deaths.add(failure)
            self.apply_failure_policy(nodes_except(draining_node_ids()))

    def apply_failure_policy(self, nodes: Nodes) -> None:
        decision = self._deaths.decide(node_count=len(nodes))
        match decision:
            case StopDecision():
                self.end.fatal = self.end.fatal or FatalError(decision.reason, decision.remedy)
            case RestartDecision():
                for line in self._world.exclude_failing_nodes(nodes, decision.without):
                    self._display.note(line)
                self._announce_low_memory_mode(decision.frugal)
            case _:
                assert_never(decision)
        if not self._is_taken_over():
            self._log.write_failures(self._deaths.failures)

    def _announce_low_memory_mode(self, frugal: bool) -> None:
        """Tell the operator, once, that the next ranks save memory."""
        if frugal and not self._frugal:
            failures = self._deaths.failures
            step = max(each.step for each in failures if each.committed == failures[-1].committed)
            why = "without an error, perhaps for lack of memory"
            reason = f"ranks died {SILENT_DEATH_LIMIT} times, at last after step {step:,}, {why}"
            self._log.event("memory_failed", step=step, reason=reason)
            self._display.note(f"{reason}: the next ranks have neither in-memory copies nor spare processes")
        self._frugal = frugal


def _ensure_ray() -> None:
    dead = dead_process()
    if dead is not None:
        raise TransientRunError(f"Ray is lost: its {dead} has died", remedy=UNSAVED_STEPS_REMEDY)
