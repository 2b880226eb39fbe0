"""What a rank of one group does in its process: it answers the driver, joins the group, trains, and reports its
outcome."""

import gc
import os
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist

from checkpoints.attempt import Attempt
from checkpoints.errors import CheckpointError, NewerFormat, NoGoodCheckpoint, Superseded
from checkpoints.gloo_peers import GROUP_TIMEOUT, GlooPeers
from data_service.errors import CorpusError, CorruptBlock, InputError, PlanError, TokenizerError
from data_service.samples.spec import StreamSpec
from data_service.service.client import FeedClient
from data_service.service.gauges import StoreRetryGauge
from data_service.store.errors import TRANSIENT_ERRORS, StoreError
from data_service.store.open import open_store
from encoder_core.errors import ModelError, TrainingError
from encoder_core.layers.torch_internals import nccl_backends
from encoder_core.train.engine import leave_groups
from encoder_core.train.exchange import RankGroup
from encoder_core.train.groups import abort_groups, groups_failed, leave_count
from encoder_core.train.loop import HANDING_OVER
from encoder_core.train.weight_check import CorruptReplica
from launcher.errors import PEER_GONE_MESSAGES, RecipeError, RunError
from launcher.runtime.cluster.memory_keeper import StateKeepersClient
from launcher.runtime.cluster.orders import (
    Assignment,
    EndedUnsaved,
    FatalError,
    FinishedTraining,
    JoinedGroup,
    RankError,
    RankNews,
    RankOrders,
    RankOutcome,
    RankResult,
    RestartFromEarlierState,
    RunTakenOver,
    UnfitNodes,
)
from launcher.runtime.cluster.rank_device import select_device
from launcher.runtime.cluster.rank_placement import Seat
from launcher.runtime.policies.failures import FailureKind
from launcher.runtime.policies.watchdog import (
    TRIAL_SUM_ACTIVITIES,
    RankHeartbeat,
    RankLocation,
    Watchdog,
    stack_of_every_thread,
)
from launcher.runtime.preflight.collective import (
    NodeReport,
    UnfitGroup,
    add_sum_findings,
    first_sums,
    preflight,
    problem_and_remedy,
    unfit_reports,
    warning_lines,
)
from launcher.runtime.preflight.measure import PreflightSubject
from launcher.runtime.preflight.network import rank_network_variables as network_variables
from launcher.runtime.rank.journal import EndAction
from launcher.runtime.rank.main import run_rank
from launcher.runtime.rank.microbatch_size import SmallerMicrobatch
from launcher.runtime.rank.spike_guard import Rewound
from launcher.runtime.rank.startup import StartupClock
from launcher.runtime.run.record import Run
from launcher.runtime.run.removals import read_removals

_RANK_0_TIMEOUT_S, _RANK_0_RETRY_S = 60.0, 0.01  # time limit and interval of attempts to connect to rank 0
# torch's timeout of a collective, relative to the watchdog's limit, which must come first: it names the stuck ranks.
_COLLECTIVE_TIMEOUT_RATIO = 1.5
_MAX_WAITING_RECORDS = 4096  # if more wait for the driver to ask, the oldest are dropped
_ERROR_LENGTH = 500  # an error is cut to this length; failures are compared by it
_USER_ERRORS = (
    RecipeError, RunError, NoGoodCheckpoint, NewerFormat, InputError, CorpusError, PlanError, TokenizerError,
    ModelError, TrainingError,
)  # fmt: skip
"""Errors in the inputs of a run, or damage to it: a restart does not cure them."""


class DriverLink:
    """A rank's connection to the driver, which calls `talk` on a separate thread. So a rank that waits in a collective
    still reports its progress, and its collectives are aborted if another rank has died.

    Attributes:
        peer_gone: whether another rank has died, so that this process aborted its process groups.
    """

    def __init__(self, rank: int, save_multiple: int) -> None:
        self.rank, self._save_multiple = rank, save_multiple
        self.peer_gone, self._left = False, leave_count()  # `_left`: as in `abort_groups`
        self._where = (0, "starting", 0)  # step, activity, progress within the activity
        self._resumed: int | None = None
        self._orders, self._told = RankOrders(), 0  # last orders, number of heartbeats sent
        self._records: deque[Mapping[str, Any]] = deque(maxlen=_MAX_WAITING_RECORDS)
        self._notes: deque[str] = deque(maxlen=_MAX_WAITING_RECORDS)
        self._events: deque[tuple[str, Mapping[str, Any]]] = deque(maxlen=_MAX_WAITING_RECORDS)
        self._place = RankLocation(ray.get_runtime_context().get_node_id(), os.getpid(), socket.gethostname())
        self._retries = StoreRetryGauge()

    def beat(self, step: int, doing: str, done: int = 0) -> None:
        """Set the progress that heartbeats report: step, activity, and progress within a long activity."""
        self._where = (step, doing, done)
        if doing == "loading":
            self._resumed = step

    def record(self, record: dict[str, Any]) -> None:
        self._records.append(record)

    def note(self, text: str) -> None:
        self._notes.append(text)

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._events.append((kind, {**fields, "rank": self.rank, "host": self._place.host}))

    def stop_requested(self) -> bool:
        """Return whether the rank must end before its next step. When the state is handed over in memory, only rank 0
        returns True, since rank 0 decides for all when copies are made."""
        ending, here = self.end_action, self._where[0] % self._save_multiple == 0
        paused = ending == "save" or (ending == "hand over" and self.rank == 0)
        return self._orders.stop or (paused and here)

    @property
    def end_action(self) -> EndAction | None:
        """What the rank must do with its last state; None if it was not ordered to end."""
        orders = self._orders
        if not (orders.stop or orders.pause):
            return None
        return "hand over" if orders.hand_over and not orders.stop else "save"

    @property
    def left_state_in_memory(self) -> bool:
        """Whether the rank has left its last state in memory without saving it."""
        return self._where[1] == HANDING_OVER

    @property
    def is_saving_last(self) -> bool:
        """Whether the rank is saving its last checkpoint after a request to stop."""
        return self._orders.stop and self._where[1] == "saving"

    def talk(self, orders: RankOrders) -> RankNews:
        """Take the driver's orders, and return the news since the last call."""
        self._orders = orders
        if orders.abort or groups_failed():
            self.peer_gone = True
            abort_groups(self._left)
        self._retries.update()
        return self.news(stack_of_every_thread() if orders.stacks else None)

    def news(self, stack: str | None = None) -> RankNews:
        """Return the news since the last call. `stack`: as in `RankNews`."""
        lists = (_pop_all(self._records), _pop_all(self._notes), _pop_all(self._events))
        self._told += 1
        return RankNews(RankHeartbeat(self._told, *self._where, self._place), self._resumed, *lists, stack=stack)


def _pop_all(waiting: deque[Any]) -> list[Any]:
    taken = []
    with suppress(IndexError):  # two threads may pop at the same time
        while True:
            taken.append(waiting.popleft())
    return taken


@dataclass(frozen=True)
class _GroupMembership:
    """What joining a group gives a rank: process groups, node ids of all ranks, preflight reports."""

    control: RankGroup
    peers: GlooPeers
    nodes: Sequence[str]
    reports: Sequence[NodeReport]


class Rank:
    """One rank of group number `group`, in this process. `began`: `time.monotonic()` before the libraries were
    imported.

    The rank leaves its process groups at its end. If it ended without an error, or because another rank died, this
    process can then train again as a rank of another group.
    """

    def __init__(self, group: int, seat: Seat, assignment: Assignment, began: float) -> None:
        gc.freeze()  # excludes imported objects from garbage collection
        self.group, self._seat, self._assignment = group, seat, assignment
        self._startup = StartupClock(assignment.before, began, assignment.processes)
        self._startup.end_part("imports")
        self.link = DriverLink(seat.rank, assignment.save_multiple)
        self._membership: _GroupMembership | None = None

    @property
    def joined(self) -> bool:
        return self._membership is not None

    def join(self) -> RankResult:
        """Connect to the other ranks, and run the preflight. Collective."""
        return self._run_and_leave(self._join)

    def train(self, attempt: int) -> RankResult:
        """Train as attempt number `attempt` until the run is complete or the driver orders an end. Collective."""
        return self._run_and_leave(lambda: self._train(attempt))

    def leave(self, group_is_broken: bool) -> None:
        """Leave the process groups and free the engine (`_leave_groups_and_free_engine`)."""
        self._membership = None  # drops references to the process groups
        _leave_groups_and_free_engine(group_is_broken)

    def _run_and_leave(self, work: Callable[[], JoinedGroup | FinishedTraining]) -> RankResult:
        """Run `work`, leave the process groups unless it has only joined them, and return the outcome."""
        broken, stays = False, True
        outcome: RankOutcome
        try:
            outcome = work()
            if isinstance(outcome, JoinedGroup):
                return RankResult(outcome, stays, self.link.news())
        except BaseException as error:
            broken, outcome = True, outcome_for_error(error, self.link)
            spared = isinstance(error, Exception) and isinstance(outcome, RankError) and outcome.kind == "silent"
            stays = spared or isinstance(outcome, EndedUnsaved)
            traceback.clear_frames(error.__traceback__)  # its frames refer to the process groups, too
        try:
            self.leave(broken)
        except RuntimeError:  # CUDA reports that the GPU has failed
            stays = False
        return RankResult(outcome, stays, self.link.news())

    def _join(self) -> JoinedGroup:
        _join_network(self._seat, self._assignment.recipe.watchdog)
        control = RankGroup.join()
        peers = GlooPeers(dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT))
        nodes = [str(node) for node in peers.all_gather(ray.get_runtime_context().get_node_id())]
        self._startup.end_part("group")
        reports = run_preflight(self._assignment, self.link, peers, nodes)
        self._startup.end_part("preflight")
        self._membership = _GroupMembership(control, peers, nodes, reports)
        return JoinedGroup(warning_lines(reports))

    def _train(self, number: int) -> FinishedTraining:
        assert self._membership is not None
        assignment, link, member = self._assignment, self.link, self._membership
        run = _assigned_run(assignment)
        attempt, rank = Attempt(run.store, number), member.peers.rank

        def open_stream(spec: StreamSpec) -> FeedClient:
            client = FeedClient(assignment.feed, spec, lambda blocks: link.beat(0, "counting", blocks))
            for note in client.notes if rank == 0 else ():
                link.note(note)
            return client

        memory = None
        if assignment.keepers:
            keepers, remembers = assignment.keepers, assignment.remembers
            memory = StateKeepersClient(keepers, member.nodes, rank, attempt=number, remembers=remembers)
        parts = (member.control, member.peers, open_stream, link, self._startup, member.reports, memory)
        state = run_rank(run, attempt, *parts)
        return FinishedTraining(state.step, saved=not link.left_state_in_memory)


def _assigned_run(assignment: Assignment) -> Run:
    """Return the run as the driver opened it. The stored recipe and record may have changed since, for the next
    start."""
    uri, store = assignment.run_uri, open_store(assignment.run_uri)
    return Run(uri, store, assignment.recipe, assignment.record, read_removals(store), assignment.removals)


def _leave_groups_and_free_engine(broken: bool) -> None:
    """Leave the process groups, and free the memory of the engine. `broken`: as in `leave_groups`.

    Raises RuntimeError if the GPU has failed, so that this process cannot train again."""
    leave_groups(broken=broken)
    gc.collect()  # models and engines have reference cycles
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def _join_network(seat: Seat, limits: Watchdog) -> None:
    """Connect to the other ranks through the network interface that has this node's Ray address."""
    os.environ.update(network_variables(ray.util.get_node_ip_address(), os.environ))
    select_device(seat)
    _await_rank_0(seat)
    dist.init_process_group(
        "nccl" if seat.gpus else "gloo",
        init_method="env://",
        rank=seat.rank,
        world_size=seat.world,
        timeout=timedelta(seconds=_COLLECTIVE_TIMEOUT_RATIO * max(limits.step, limits.other)),
    )
    nccl_backends()  # raises here if this torch cannot abort its NCCL groups later


def _await_rank_0(seat: Seat) -> None:
    """Wait until rank 0 accepts connections, for a minute at most. torch's own retry waits half a second, which would
    be most of the time of a restart."""
    deadline = time.monotonic() + _RANK_0_TIMEOUT_S
    while seat.rank and time.monotonic() < deadline:
        with suppress(OSError), socket.create_connection(seat.master, timeout=_RANK_0_TIMEOUT_S):
            return
        time.sleep(_RANK_0_RETRY_S)


def outcome_for_error(error: BaseException, link: DriverLink) -> RankOutcome:
    """Return the outcome of a rank that raised `error`. Errors that a restart may cure become a RankError, for the
    failure policy."""
    match error:
        case UnfitGroup():
            return UnfitNodes([report.event_fields() for report in error.reports], *problem_and_remedy(error.reports))
        case _ if link.peer_gone:
            return _describe_failure(error, link)
        case Superseded():
            return RunTakenOver(error.problem)
        case CheckpointError() | StoreError() if link.is_saving_last:  # only the last save after a stop failed
            return EndedUnsaved(error.problem)
        case CorruptBlock():  # perhaps damaged on this machine only, which a restart cures
            return _describe_failure(error, link)
        case _ if isinstance(error, _USER_ERRORS):
            return FatalError(error.problem, error.remedy)
        case Rewound():
            if link.rank == 0:
                link.note(str(error))
            return RestartFromEarlierState()
        case SmallerMicrobatch():  # raised on the rank that ran out of memory
            link.note(str(error))
            return RestartFromEarlierState()
        case _:
            return _describe_failure(error, link)


def _describe_failure(error: BaseException, link: DriverLink) -> RankError:
    """Return `error` for the failure policy. All ranks raise CorruptReplica, even intact ones, so the ranks at fault
    are taken from the error itself."""
    blamed = error.ranks if isinstance(error, CorruptReplica) else None
    name = "" if isinstance(error, CorruptReplica) else f"{type(error).__name__}: "
    trace = "".join(traceback.format_exception(error))
    return RankError(f"{name}{error}"[:_ERROR_LENGTH], _failure_kind(error, link), trace, blamed)


def _failure_kind(error: BaseException, link: DriverLink) -> FailureKind:
    if link.peer_gone:  # this error may be a consequence of the other rank's death
        return "silent"
    if isinstance(error, TRANSIENT_ERRORS):
        return "transient"
    if isinstance(error, ray.exceptions.RayError) and not isinstance(error, ray.exceptions.RayTaskError):
        return "silent"  # another Ray process has died
    lost = isinstance(error, dist.DistNetworkError) or not isinstance(error, Exception)
    gone = isinstance(error, RuntimeError) and any(sign in str(error) for sign in PEER_GONE_MESSAGES)
    return "silent" if lost or gone else "raised"


def run_preflight(assignment: Assignment, link: DriverLink, peers: GlooPeers, nodes: Sequence[str]) -> list[NodeReport]:
    """Run the preflight of the nodes, then the trial all-reduce of the group. Collective. A rank that hangs before the
    all-reduce still reports "starting", so the watchdog can name it. Raises UnfitGroup if a node must not train."""
    reports = preflight(PreflightSubject(assignment.recipe, assignment.run_uri), peers, nodes)
    _check_nodes_fit(reports)
    link.beat(0, TRIAL_SUM_ACTIVITIES[dist.get_backend()])
    reports = add_sum_findings(reports, first_sums(peers), nodes)
    link.beat(0, "starting")
    _check_nodes_fit(reports)
    return reports


def _check_nodes_fit(reports: Sequence[NodeReport]) -> None:
    if bad := unfit_reports(reports):
        raise UnfitGroup(bad)
