"""Runs a run: claims the attempt, starts the data service and the ranks through Ray, shows progress, ends cleanly.

Ray places the ranks and restarts them when they die. Which attempt may write, where to resume, when to stop and which
failures a restart cannot cure are decided here and in the monitor, never by Ray's own checkpoint machinery.
"""

import logging
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import ray
from ray.train import TrainingFailedError

from checkpoints.attempt import Attempt, Heartbeat, Owner, claim, end_all
from checkpoints.gather import Alone
from checkpoints.layout import Manifest
from checkpoints.load import newest_good
from data_service.feed import FeedConfig, start_feed
from launcher.backends.settings import JOIN_SECONDS
from launcher.errors import RunError
from launcher.fitting import Display, Follow, trainer
from launcher.guard import Guard
from launcher.monitor import start_monitor
from launcher.resources import Resources, cores_of, data_workers, gpus_of, plan_resources, sizing
from launcher.runs import Run
from launcher.session import memory_refresh
from launcher.standing import Status
from launcher.stopping import REQUEUE, Stopping
from launcher.worker import Assignment

DONE = 0


@dataclass(frozen=True)
class Outcome:
    """How a start of a run ended: the exit code, the step it stands at, and who asked it to stop, if anybody did."""

    code: int
    step: int
    reason: str | None = None


def train(run: Run, display: Display, nodes: int = 1) -> Outcome:
    """Start or continue `run` and stay with it until it is complete or asked to stop (SIGTERM, Ctrl-C).

    Begins when the Ray cluster has `nodes` nodes.

    Raises:
        RunIsActive: another start of it is alive.
        RunError: it cannot go on, or nodes are missing; the message says why.
    """
    owner = Owner.here(time.time())
    attempt = claim(run.store, owner=owner)
    try:
        newest = _newest(run)
        if newest is not None and newest.step >= run.recipe.total_steps:
            return Outcome(DONE, newest.step)
        return _supervise(run, attempt, owner, display, newest, nodes)
    finally:
        end_all(run.store, owner, time.time())


def _newest(run: Run) -> Manifest | None:
    """The newest checkpoint. Every rank verifies it before it is used."""
    good = newest_good(run.store, Alone(), full=False)
    return good.manifest if good else None


def _supervise(
    run: Run, attempt: Attempt, owner: Owner, display: Display, last: Manifest | None, nodes: int
) -> Outcome:
    """`last`: the newest checkpoint."""
    with (
        _ray(plan_resources(run.recipe)),
        tempfile.TemporaryDirectory(prefix="maskfleet-ray-train-") as scratch,
    ):
        asked = threading.Event()
        # The monitor beats, and is told to stop, once it is there.
        with Stopping(attempt, asked.set, display.note) as waiting, Heartbeat(attempt):
            _await_nodes(nodes, asked, display)
        if waiting.reason is not None:
            return Outcome(waiting.code, last.step if last else 0, waiting.reason)
        there = ray.nodes()
        size = sizing(run.recipe, gpus_of(there))
        monitor = start_monitor(attempt, owner, size, last.world_size if last else None)
        feed = start_feed(_feed_config(run, data_workers(run.recipe, cores_of(there), size.most)))
        refresh = memory_refresh(run.recipe)
        assignment = Assignment(run.store.uri, monitor, feed, run.recipe, refresh.every if refresh else 1)
        follow = Follow(monitor, Guard(run, monitor, display.note), display)
        with Stopping(attempt, monitor.stop.remote, display.note) as stopping:
            for fit in count():
                name = f"a{attempt.number:06d}-{os.getpid()}-{fit}"
                error = follow.fit(trainer(assignment, size, scratch, name))
                if error is not None or not _goes_on(run, follow.status):
                    break
        outcome = _outcome(run, follow.status, error)
        return replace(outcome, code=stopping.code if outcome.code else DONE, reason=stopping.reason)


def _goes_on(run: Run, status: Status) -> bool:
    """Whether the ranks ended to make room for others: more of them."""
    if status.fatal is not None or status.idle or not status.paused:
        return False
    return status.finished is not None and status.finished < run.recipe.total_steps


def _outcome(run: Run, status: Status, error: BaseException | None) -> Outcome:
    if status.idle:
        newest = _newest(run)
        return Outcome(REQUEUE, newest.step if newest else 0)
    if status.fatal is not None:
        raise RunError(status.fatal.problem, remedy=status.fatal.remedy) from error
    if isinstance(error, TrainingFailedError):
        raise RunError(
            f"training failed and was not restarted: {error}",
            remedy=f"see the log above, then run the same command again: it resumes from {run.uri}",
        ) from error
    if error is not None:
        raise error
    if status.finished is None:
        raise RunError("the ranks ended without saying where", remedy="run the same command again to resume")
    complete = status.finished >= run.recipe.total_steps
    return Outcome(DONE if complete else REQUEUE, status.finished)


def _feed_config(run: Run, workers: int) -> FeedConfig:
    """Row counts are kept with the run, so that only its first start pays for counting them."""
    memory = int(run.recipe.data_service.memory)
    return FeedConfig(workers=workers, memory=memory, cache=run.store.at("cache").uri)


@contextmanager
def _ray(resources: Resources) -> Iterator[None]:
    """Join the cluster in RAY_ADDRESS, or start one on this machine for the length of the run.

    Ranks tell the operator what matters through the monitor; the rest of what they print stays in Ray's log folder.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")  # how soon a dead rank is noticed
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")  # a process each; the monitor looks
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "10")  # until places are counted again
    local = {} if os.environ.get("RAY_ADDRESS") else _local_cluster(resources)
    ray.init(logging_level=logging.ERROR, log_to_driver=False, **local)
    try:
        yield
    finally:
        ray.shutdown()


def _await_nodes(wanted: int, asked: threading.Event, display: Display) -> None:
    """Until the cluster has `wanted` nodes, or a stop is asked for. Raises RunError naming the nodes that came, if the
    others do not."""
    seconds = float(os.environ.get("MASKFLEET_JOIN_SECONDS", JOIN_SECONDS))  # as infra/ray_node.sh waits
    deadline, told = time.monotonic() + seconds, False
    while len(there := sorted(node["NodeName"] for node in ray.nodes() if node["Alive"])) < wanted:
        if not told:
            display.note(f"waiting for nodes: {len(there)} of {wanted} are there")
            told = True
        if time.monotonic() > deadline:
            raise RunError(
                f"only {len(there)} of {wanted} nodes joined the Ray cluster in {seconds:g} s: {', '.join(there)}",
                remedy="see the log of the nodes that are missing; start with fewer (--nodes) to go on without them",
            )
        if asked.wait(0.5):
            return


def _local_cluster(resources: Resources) -> dict[str, Any]:
    return {
        "address": "local",  # without it, Ray would join any cluster it finds on the machine
        "num_cpus": resources.local_cpus,
        "include_dashboard": False,
        "object_store_memory": resources.object_store_bytes,
    }
