"""The driver of one start of a run: it claims the run, starts the ranks, and records how the start ended.

Ray places processes and reports their deaths. The driver decides everything else: which attempt may write, where to
resume, when to start ranks again, when to stop, and which failures end the run. Services that training does not need
(`CompanionServices`) are passed in by the command line, so the runtime imports neither trackers nor evaluation tasks.

All errors become one of the exit codes of `launcher.exit_codes`. Only a wrong input, or a failure that restarts have
not cured, ends a run for good.
"""

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

import ray
from rich.console import Console

from checkpoints.attempt import Attempt, Owner, end_newest_attempt
from checkpoints.errors import RunIsActive, Superseded
from checkpoints.gather import SingleRank
from checkpoints.layout import CheckpointManifest
from checkpoints.listing import list_committed
from checkpoints.ownership import await_claim
from checkpoints.verify import find_newest_good
from data_service.errors import UserError as DataError
from data_service.processes import temporary_root
from data_service.service.feed import FeedConfig, FeedHandle, start_feed
from data_service.service.ray_internals import is_cluster_configured
from data_service.store.errors import TRANSIENT_ERRORS, StoreError
from encoder_core.errors import UserError as ModelError
from launcher.command import open_terminal_stream, supervisor_pid
from launcher.errors import RunError
from launcher.exit_codes import FINISHED, MISTAKE, REPEAT, exit_code_for
from launcher.runtime.cluster.control_loop import ControlLoop, LoopOutcome
from launcher.runtime.cluster.display import ProgressDisplay
from launcher.runtime.cluster.nodes import request_nodes
from launcher.runtime.cluster.operator_log import OperatorLog, past_failures, record_failed_start
from launcher.runtime.cluster.orders import Assignment
from launcher.runtime.cluster.ray_session import NoteFunction, connected_ray, wait_for_cluster, wait_for_nodes
from launcher.runtime.cluster.resources import choose_sizing, data_worker_count, plan_resources, total_cpus, total_gpus
from launcher.runtime.cluster.run_claim import RunClaim
from launcher.runtime.cluster.stop_requests import StopRequests
from launcher.runtime.rank.startup import StartupClock
from launcher.runtime.run.create import store_changes
from launcher.runtime.run.record import Run
from launcher.runtime.run.streams import before_text_specs, heldout_specs, stream_spec


@dataclass(frozen=True)
class CompanionServices:
    """Optional services that run during training. Their errors are shown, but do not stop training.

    Attributes:
        publishing: returns a context manager that publishes the run to trackers, for the whole start.
        evaluating: returns a context manager that evaluates checkpoints while Ray is connected. Its last argument is
            the event that is set when the command is asked to stop.
        pending: returns whether the newest checkpoint of the run still has to be evaluated.
    """

    publishing: Callable[[Run, NoteFunction], AbstractContextManager[None]]
    evaluating: Callable[[Run, NoteFunction, threading.Event], AbstractContextManager[None]]
    pending: Callable[[Run], bool]


_MAX_REASON_CHARACTERS = 2000  # a recorded reason is cut to this length
_LOG_CLOSE_TIMEOUT_S = 10.0  # time limit for writing the last records
_UNCOUNTED_ERRORS = (*TRANSIENT_ERRORS, Superseded, RunIsActive)  # they do not count as failures of the run


@dataclass(frozen=True)
class RunOutcome:
    """How a start ended: exit code, number of steps that the run has done, and the reason of a stop, if any."""

    code: int
    step: int
    reason: str | None = None


def train(run: Run, console: Console, companions: CompanionServices, nodes: int = 1) -> RunOutcome:
    """Train until the run is complete or asked to stop, and show progress. Training begins when the cluster has `nodes`
    nodes. The end is recorded as an event; a start without such an event was killed.

    Raises subclasses of UserError only for mistakes of the user (exit code 2). Other errors give a RunOutcome.
    """
    watch = ProgressDisplay(console, run.recipe.total_steps)
    with (
        _separate_console_stream(console),
        closing(watch),
        companions.publishing(run, watch.note),
    ):
        log = OperatorLog(run.store, watch.note)
        try:
            return _supervise_and_record(run, watch, log, companions=companions, nodes=nodes)
        finally:
            log.close(_LOG_CLOSE_TIMEOUT_S)


@contextmanager
def _separate_console_stream(console: Console) -> Iterator[None]:
    """Have `console` write to its own stream during the `with` block, safe from redirected output and a closed
    terminal."""
    before, console.file = console.file, open_terminal_stream()
    try:
        yield
    finally:
        console.file = before


def _supervise_and_record(
    run: Run, watch: ProgressDisplay, log: OperatorLog, *, companions: CompanionServices, nodes: int
) -> RunOutcome:
    with StopRequests(watch.note) as stopping:
        try:
            outcome = supervise(run, watch, log, stopping, companions=companions, nodes=nodes)
        except KeyboardInterrupt:
            watch.note("ended at once, without saving: the steps since the last checkpoint are lost")
            return RunOutcome(REPEAT, 0, stopping.reason)
        except (DataError, ModelError) as error:
            return _record_user_error(run, error, watch, log)
        except Exception as error:
            return _record_bug(run, error, watch, log)
    reason = {"reason": outcome.reason} if outcome.reason else {}
    log.event("end" if outcome.code == FINISHED else "stop", step=outcome.step, **reason)
    return outcome


def _resume_advice(run: Run) -> str:
    with suppress(StoreError):
        if not list_committed(run.store):
            return "the same command starts it again from the beginning: it has no checkpoint yet"
    return "the same command continues from the last checkpoint"


def _record_user_error(run: Run, error: DataError | ModelError, watch: ProgressDisplay, log: OperatorLog) -> RunOutcome:
    """Record and show an error whose text is meant for users. If another start has taken the run over, nothing is
    recorded, since that is no failure."""
    if not isinstance(error, RunIsActive | Superseded):
        log.event("failed", reason=error.problem[:_MAX_REASON_CHARACTERS])
    if exit_code_for(error) == MISTAKE:
        raise error
    watch.note(f"{error.problem}\n  {error.remedy}")
    watch.note(_resume_advice(run))
    return RunOutcome(REPEAT, 0)


def _record_bug(run: Run, error: Exception, watch: ProgressDisplay, log: OperatorLog) -> RunOutcome:
    """Record and show an unexpected error (a bug of ours, or an error of Ray). The operator sees one line; the event
    has the traceback."""
    line = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    log.event(
        "failed",
        reason=line[:_MAX_REASON_CHARACTERS],
        trace="".join(traceback.format_exception(error))[-_MAX_REASON_CHARACTERS:],
    )
    watch.note(f"the driver failed: {line[:300]}")
    watch.note(_resume_advice(run))
    return RunOutcome(REPEAT, 0)


def supervise(
    run: Run,
    display: ProgressDisplay,
    log: OperatorLog,
    stopping: StopRequests,
    *,
    companions: CompanionServices,
    nodes: int = 1,
) -> RunOutcome:
    """Start or continue `run`, and supervise it until it is complete or asked to stop.

    Training begins when the Ray cluster has `nodes` nodes. `log` records the events of the run.

    Raises:
        RunIsActive: if another start of the run is still running.
        TransientRunError: if the cluster cannot be reached, nodes are missing, or Ray was lost.
        EnvironmentUnusable: as `temporary_root`.
        RunError: if the run cannot continue; the message says why.
    """
    startup = StartupClock.since_process_start(supervisor_pid())
    startup.end_part("command")
    temporary_root()  # raises before the run is claimed if Ray would lack a temporary folder
    wait_for_cluster(stopping, display.note)
    owner = Owner.for_process(supervisor_pid(), time.time())
    attempt = await_claim(run.store, owner, stopping.asked, display.note)
    if attempt is None:
        return RunOutcome(stopping.code, 0, stopping.reason)
    newest = None
    try:
        with RunClaim(attempt, owner) as claim, stopping.watching_store(attempt):
            attempt.ensure_current()
            store_changes(run, datetime.now(UTC))
            newest = _newest_checkpoint(run)
            if newest is not None and newest.step >= run.recipe.total_steps:
                _evaluate_last_commit(run, display, stopping, companions)
                return RunOutcome(FINISHED, newest.step)
            startup.end_part("claim")
            start = _RunStart(run, display, log, stopping, companions, startup, newest)
            return start.supervise(attempt, claim, nodes)
    except Exception as error:
        if not stopping.asked.is_set() and exit_code_for(error) == REPEAT and not isinstance(error, _UNCOUNTED_ERRORS):
            record_failed_start(attempt, error, committed=newest.step if newest else 0, note=display.note)
        raise
    finally:
        # If this fails, the next start sees that this process has ended, or waits until the lease expires.
        with suppress(StoreError):
            end_newest_attempt(run.store, owner, time.time())


def _evaluate_last_commit(
    run: Run, display: ProgressDisplay, stopping: StopRequests, companions: CompanionServices
) -> None:
    """Evaluate the last commit of a complete run unless an earlier start has done so."""
    if companions.pending(run):
        with (
            connected_ray(plan_resources(run.recipe), stopping),
            companions.evaluating(run, display.note, stopping.asked),
        ):
            pass


def _newest_checkpoint(run: Run) -> CheckpointManifest | None:
    """Return the newest good checkpoint. Data are not verified here, because every rank verifies them before use."""
    good = find_newest_good(run.store, SingleRank(), full=False)
    return good.manifest if good else None


@dataclass(frozen=True)
class _RunStart:
    """One start of a run that has been claimed. `last`: manifest of the newest checkpoint; None if there is none."""

    run: Run
    display: ProgressDisplay
    log: OperatorLog
    stopping: StopRequests
    companions: CompanionServices
    startup: StartupClock
    last: CheckpointManifest | None

    def supervise(self, attempt: Attempt, claim: RunClaim, nodes: int) -> RunOutcome:
        """Start Ray, the data service and companions, then supervise the ranks until they end."""
        self.display.note("joining the Ray cluster" if is_cluster_configured() else "starting Ray")
        recipe, stopping = self.run.recipe, self.stopping
        with connected_ray(plan_resources(recipe), stopping):
            self.startup.end_part("Ray")
            wait_for_nodes(nodes, stopping, self.display.note)
            if stopping.asked.is_set():
                return RunOutcome(stopping.code, self.last.step if self.last else 0, stopping.reason)
            there = ray.nodes()
            size = choose_sizing(recipe, total_gpus(there))
            feed = start_feed(_feed_config(self.run, data_worker_count(recipe, total_cpus(there), size.most)))
            prefetch_streams(self.run, feed)
            committed, ranks = (self.last.step, self.last.world_size) if self.last else (0, None)
            failures = past_failures(attempt, committed=committed, now=time.time(), note=self.display.note)
            known = (self.run, claim, size, ranks, failures)
            loop = ControlLoop(*known, display=self.display, log=self.log, stopping=stopping)
            self.startup.end_part("services")
            with (
                request_nodes([size.each] * size.most),
                self.companions.evaluating(self.run, self.display.note, stopping.asked),
                stopping.while_ranks_train(),
            ):
                end = loop.run(self._assignment(feed))
            if end.unsaved is not None:
                self.display.note(end.unsaved)
            return _run_outcome(self.run, end, stopping)

    def _assignment(self, feed: FeedHandle) -> Assignment:
        refresh = self.run.recipe.memory_refresh
        run_facts = (
            self.run.recipe,
            self.run.record,
            refresh.every if refresh else 1,
            self.run.removals,
            self.startup.seconds,
        )
        return Assignment(self.run.store.uri, feed, *run_facts, keepers={}, remembers=False, processes={})


def _run_outcome(run: Run, end: LoopOutcome, stopping: StopRequests) -> RunOutcome:
    """Return the outcome of this start. Raises RunError if the run cannot continue, Superseded if it was taken over."""
    if end.fatal is not None:
        raise RunError(end.fatal.problem, remedy=end.fatal.remedy)
    if end.taken_over:
        raise Superseded(f"another start of {run.uri} has taken it over", remedy="training goes on there")
    if end.finished is None:
        # After a failed save the store may not answer, and listing checkpoints would block.
        newest = _newest_checkpoint(run) if end.unsaved is None else None
        at = newest.step if newest else 0
        reason = f"{stopping.reason}; not saved: {end.unsaved}" if end.unsaved else stopping.reason
        return RunOutcome(stopping.code, at, reason)
    complete = end.finished >= run.recipe.total_steps
    return RunOutcome(FINISHED if complete else stopping.code, end.finished, stopping.reason)


def _feed_config(run: Run, workers: int) -> FeedConfig:
    """Return the settings of the data service. It caches row counts in the run's store, so only the first start counts
    rows."""
    memory = int(run.recipe.data_service.memory)
    return FeedConfig(workers=workers, memory=memory, cache=run.store.with_prefix("cache").uri)


def prefetch_streams(run: Run, feed: FeedHandle) -> None:
    """Open all training and held-out streams in the data service ahead of the ranks, which are still importing
    libraries.

    Opening is slow the first time, because it starts processes that count the rows of each corpus. This function does
    not wait for that and ignores errors: the ranks open the same streams again and handle them. If documents were
    removed meanwhile, the ranks open other streams, and this has no effect.
    """
    with suppress(DataError):
        tokenizer = run.tokenizer()
        specs = [stream_spec(run, tokenizer, phase) for phase in range(len(run.recipe.phases))]
        evaluated = (*heldout_specs(run, tokenizer), *before_text_specs(run, tokenizer))
        serialized_specs = [spec.model_dump_json() for spec in (*specs, *evaluated)]
        for spec in dict.fromkeys(serialized_specs):
            feed.open.remote(spec)
