"""The driver: claims the attempt, starts the data service and the ranks on Ray, follows them to the end.

Ray places processes and reports when they die. The driver decides everything else: which attempt may write, where to
resume, when to start ranks again, when to stop, and which failures end the run. Services that training does not need
(`Companions`) come from the command line: the runtime knows neither trackers nor evaluation tasks.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray

from checkpoints.attempt import Attempt, Owner, end_newest_attempt
from checkpoints.errors import RunIsActive, Superseded
from checkpoints.gather import Alone
from checkpoints.layout import CheckpointManifest
from checkpoints.newest import newest_good
from checkpoints.ownership import await_claim
from data_service.errors import UserError
from data_service.processes import temporary_root
from data_service.service.feed import FeedConfig, FeedHandle, start_feed
from data_service.service.ray_internals import joins_cluster
from data_service.store.errors import TRANSIENT_ERRORS, StoreError
from launcher.command import output_into, supervisor_process
from launcher.errors import RunError, TryAgain
from launcher.exit_codes import FINISHED, JOIN_SECONDS, REPEAT, code_of
from launcher.runtime.cluster.assignment import Assignment
from launcher.runtime.cluster.control_loop import ControlLoop, Display, LoopEnd
from launcher.runtime.cluster.deaths import count_start, past_failures
from launcher.runtime.cluster.nodes import connect, log_folder, request_nodes
from launcher.runtime.cluster.operator_log import OperatorLog
from launcher.runtime.cluster.resources import (
    Resources,
    cores_of,
    data_workers,
    gpus_of,
    plan_resources,
    sizing,
)
from launcher.runtime.cluster.run_claim import RunClaim
from launcher.runtime.cluster.stop_requests import StopRequests
from launcher.runtime.preflight.network import connection_error
from launcher.runtime.rank.startup import Startup
from launcher.runtime.run.record import Run
from launcher.runtime.run.streams import before_specs, heldout_specs, stream_spec

Note = Callable[[str], None]
"""Shows a line to the operator."""


@dataclass(frozen=True)
class Companions:
    """Services that run beside training. Their errors are shown, and training continues.

    Attributes:
        publishing: context manager that publishes the run to trackers; it lasts as long as the start.
        evaluating: context manager that evaluates commits; it lasts as long as Ray is connected. Its last argument is
            the event that is set when the command is asked to stop.
        pending: function that returns whether the newest commit of the run still has to be evaluated.
    """

    publishing: Callable[[Run, Note], AbstractContextManager[None]]
    evaluating: Callable[[Run, Note, threading.Event], AbstractContextManager[None]]
    pending: Callable[[Run], bool]


_UNCOUNTED = (*TRANSIENT_ERRORS, Superseded, RunIsActive)  # errors that say nothing against the run
_CONNECT_S = 60.0  # time limit for the head of a cluster to answer
_CONNECTION_S = 2.0  # time limit of one connection to it
_SHUTDOWN_S = 5.0  # time limit for Ray to disconnect


@dataclass(frozen=True)
class RunOutcome:
    """The end of a start: the exit code, the number of steps the run has done, and the reason for the stop, if any."""

    code: int
    step: int
    reason: str | None = None


def supervise(
    run: Run,
    display: Display,
    log: OperatorLog,
    stopping: StopRequests,
    *,
    companions: Companions,
    nodes: int = 1,
) -> RunOutcome:
    """Start or continue `run`, and follow it until it is complete or asked to stop.

    Training begins when the Ray cluster has `nodes` nodes. `log` records what happens to its ranks.

    Raises:
        RunIsActive: if another start of the run is alive.
        TryAgain: if the cluster cannot be reached, nodes are missing, or Ray was lost.
        EnvironmentUnusable: as `temporary_root`.
        RunError: if the run cannot continue; the message says why.
    """
    startup = Startup.from_command(supervisor_process())
    startup.done("command")
    temporary_root()  # Ray needs a temporary folder: check before the run is claimed
    _await_cluster(stopping, display)
    owner = Owner.for_process(supervisor_process(), time.time())
    attempt = await_claim(run.store, owner, stopping.asked, display.note)
    if attempt is None:
        return RunOutcome(stopping.code, 0, stopping.reason)
    newest = None
    try:
        with RunClaim(attempt, owner) as claim, stopping.requests(attempt):
            newest = _newest_checkpoint(run)
            if newest is not None and newest.step >= run.recipe.total_steps:
                _evaluate_last_commit(run, display, stopping, companions)
                return RunOutcome(FINISHED, newest.step)
            startup.done("claim")
            start = _RunStart(run, display, log, stopping, companions, startup, newest)
            return start.supervise(attempt, claim, nodes)
    except Exception as error:
        if not stopping.asked.is_set() and code_of(error) == REPEAT and not isinstance(error, _UNCOUNTED):
            count_start(attempt, error, committed=newest.step if newest else 0, note=display.note)
        raise
    finally:
        with suppress(
            StoreError
        ):  # if this fails, the next start sees that the process is gone, or waits for the lease
            end_newest_attempt(run.store, owner, time.time())


def _evaluate_last_commit(run: Run, display: Display, stopping: StopRequests, companions: Companions) -> None:
    """Evaluate the last commit of a complete run, if the command that completed the run did not evaluate it."""
    if companions.pending(run):
        with (
            _ray_session(plan_resources(run.recipe), stopping),
            companions.evaluating(run, display.note, stopping.asked),
        ):
            pass


def _newest_checkpoint(run: Run) -> CheckpointManifest | None:
    """Return the newest checkpoint, without a full check: every rank verifies it before use."""
    good = newest_good(run.store, Alone(), full=False)
    return good.manifest if good else None


@dataclass(frozen=True)
class _RunStart:
    """One start of a run whose attempt is claimed. `last`: the newest checkpoint."""

    run: Run
    display: Display
    log: OperatorLog
    stopping: StopRequests
    companions: Companions
    startup: Startup
    last: CheckpointManifest | None

    def supervise(self, attempt: Attempt, claim: RunClaim, nodes: int) -> RunOutcome:
        """Start Ray and its services, then follow the ranks to their end."""
        self.display.note("joining the Ray cluster" if joins_cluster() else "starting Ray")
        recipe, stopping = self.run.recipe, self.stopping
        with _ray_session(plan_resources(recipe), stopping):
            self.startup.done("Ray")
            _await_nodes(nodes, stopping, self.display)
            if stopping.asked.is_set():
                return RunOutcome(stopping.code, self.last.step if self.last else 0, stopping.reason)
            there = ray.nodes()
            size = sizing(recipe, gpus_of(there))
            feed = start_feed(_feed_config(self.run, data_workers(recipe, cores_of(there), size.most)))
            open_streams_ahead(self.run, feed)
            committed, ranks = (self.last.step, self.last.world_size) if self.last else (0, None)
            failures = past_failures(attempt, committed=committed, now=time.time(), note=self.display.note)
            known = (self.run, claim, size, ranks, failures)
            loop = ControlLoop(*known, display=self.display, log=self.log, stopping=stopping)
            self.startup.done("services")
            with (
                request_nodes([size.each] * size.most),
                self.companions.evaluating(self.run, self.display.note, stopping.asked),
                stopping.saving(),
            ):
                end = loop.run(self._assignment(feed))
            if end.unsaved is not None:
                self.display.note(end.unsaved)
            return _outcome(self.run, end, stopping)

    def _assignment(self, feed: FeedHandle) -> Assignment:
        refresh = self.run.recipe.memory_refresh
        told = (self.run.recipe, refresh.every if refresh else 1, self.run.removals, self.startup.seconds)
        return Assignment(self.run.store.uri, feed, *told, keepers={}, remembers=False, processes={})


def _outcome(run: Run, end: LoopEnd, stopping: StopRequests) -> RunOutcome:
    """Return how this start ended. Raises RunError or Superseded if the run cannot continue here."""
    if end.fatal is not None:
        raise RunError(end.fatal.problem, remedy=end.fatal.remedy)
    if end.taken_over:
        raise Superseded(f"another start of {run.uri} has taken it over", remedy="training goes on there")
    if end.finished is None:
        newest = (
            _newest_checkpoint(run) if end.unsaved is None else None
        )  # after a failed save the store does not answer, and the call would wait for it
        at = newest.step if newest else 0
        reason = f"{stopping.reason}; not saved: {end.unsaved}" if end.unsaved else stopping.reason
        return RunOutcome(stopping.code, at, reason)
    complete = end.finished >= run.recipe.total_steps
    return RunOutcome(FINISHED if complete else stopping.code, end.finished, stopping.reason)


def _feed_config(run: Run, workers: int) -> FeedConfig:
    """Return the settings of the data service. Row counts are cached with the run, so only its first start counts
    them."""
    memory = int(run.recipe.data_service.memory)
    return FeedConfig(workers=workers, memory=memory, cache=run.store.at("cache").uri)


def _await_cluster(stopping: StopRequests, display: Display) -> None:
    """Wait until something answers at RAY_ADDRESS. Ray itself would try for many minutes without a useful message.

    Raises TryAgain if nothing answers. It is no mistake of the user for certain, because a wrong address and a head
    that has not started yet look alike.
    """
    address = os.environ.get("RAY_ADDRESS", "")
    deadline, told = time.monotonic() + _CONNECT_S, False
    while not stopping.asked.is_set():
        refused = connection_error(address, _CONNECTION_S)
        if refused is None:
            return
        if time.monotonic() > deadline:
            raise TryAgain(
                f"no Ray cluster answers at RAY_ADDRESS={address}: {refused}",
                remedy="check the address and that the cluster's head is up; unset RAY_ADDRESS to train on this "
                "machine alone",
            ) from refused
        if not told:
            told = True
            display.note(f"nothing answers at RAY_ADDRESS={address} yet: trying for {_CONNECT_S:.0f} s")
        stopping.asked.wait(0.5)


@contextmanager
def _ray_session(resources: Resources, stopping: StopRequests) -> Iterator[None]:
    """Join the cluster in RAY_ADDRESS, or start a Ray on this machine for as long as the run lasts.

    The output of ranks stays in Ray's log folder. They tell the driver what the operator should know.
    """
    local = {} if joins_cluster() else _local_cluster(resources)
    try:
        connect(**local)
    except ValueError as error:  # Ray's, where its object store would leave no memory for anything else
        if not local:
            raise
        raise resources.too_large(str(error)) from error
    stopping.listen()
    with output_into(log_folder() / f"maskfleet-{os.getpid()}.log"):
        try:
            yield
        finally:
            goodbye = threading.Thread(target=ray.shutdown, name="goodbye", daemon=True)
            goodbye.start()
            goodbye.join(_SHUTDOWN_S)


def _await_nodes(wanted: int, stopping: StopRequests, display: Display) -> None:
    """Wait until the cluster has `wanted` nodes, or a stop is requested. Raises TryAgain if nodes are still missing
    after the time limit; the message names the nodes that joined."""
    seconds = float(os.environ.get("MASKFLEET_JOIN_SECONDS", JOIN_SECONDS))  # as infra/ray_node.sh waits
    deadline, told = time.monotonic() + seconds, False
    while len(there := sorted(node["NodeName"] for node in ray.nodes() if node["Alive"])) < wanted:
        if not told:
            display.note(f"waiting for nodes: {len(there)} of {wanted} are there")
            told = True
        if time.monotonic() > deadline:
            raise TryAgain(
                f"only {len(there)} of {wanted} nodes joined the Ray cluster in {seconds:g} s: {', '.join(there)}",
                remedy="see the logs of the missing nodes, or start with fewer nodes (--nodes) to train without them",
            )
        if stopping.asked.wait(0.5):
            return


def _local_cluster(resources: Resources) -> dict[str, Any]:
    return {
        **_metrics_port(),
        "num_cpus": resources.local_cpus,
        "object_store_memory": resources.object_store_bytes,
    }


def _metrics_port() -> dict[str, int]:
    """Return the option of Ray for the port at which Prometheus finds this node's figures (MASKFLEET_METRICS_PORT, as
    in infra/ray_node.sh). If it is not set, Ray takes a free port. Raises RunError if it is no port."""
    given = os.environ.get("MASKFLEET_METRICS_PORT", "")
    if given and not (given.isdecimal() and 0 < int(given) < 65536):
        raise RunError(
            f"MASKFLEET_METRICS_PORT is {given!r}, which is not a port",
            remedy="set it to a number from 1 to 65535, or unset it",
        )
    return {"_metrics_export_port": int(given)} if given else {}


def open_streams_ahead(run: Run, feed: FeedHandle) -> None:
    """Ask the feed for the streams of all phases, and for held-out rows, in the order in which ranks open them, while
    the ranks still import their libraries.

    The first rank that asked would wait: the feed's process starts, rows are counted by further processes, once a
    corpus, and each has imports of its own. Nothing waits for the answers. What goes wrong is left to the ranks, which
    ask again and know what follows from it. Ranks that need another stream, because documents were removed meanwhile,
    gain nothing.
    """
    with suppress(UserError):
        tokenizer = run.tokenizer()
        specs = [stream_spec(run, tokenizer, phase) for phase in range(len(run.recipe.phases))]
        evaluated = (*heldout_specs(run, tokenizer), *before_specs(run, tokenizer))
        told = [spec.model_dump_json() for spec in (*specs, *evaluated)]
        for spec in dict.fromkeys(told):
            feed.open.remote(spec)
