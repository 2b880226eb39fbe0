"""Runs a run: claims the attempt, starts the data service and the ranks through Ray, shows progress, ends cleanly.

Ray places the ranks and restarts them when they die. Which attempt may write, where to resume, when to stop and which
failures a restart cannot cure are decided here and in the monitor, never by Ray's own checkpoint machinery.
"""

import logging
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import ray
from ray.train import TrainingFailedError

from checkpoints.attempt import Attempt, Owner, claim, end_all
from checkpoints.gather import Alone
from checkpoints.load import newest_good
from data_service.feed import FeedConfig, start_feed
from launcher.errors import RunError
from launcher.fitting import Display, Follow, trainer
from launcher.guard import Guard
from launcher.metrics import operator_event
from launcher.monitor import Status, start_monitor
from launcher.resources import Resources, plan_resources
from launcher.runs import Run
from launcher.worker import Assignment

DONE, REQUEUE = 0, 75


@dataclass(frozen=True)
class Outcome:
    """How a start of a run ended: the exit code, and the step it stands at."""

    code: int
    step: int


def train(run: Run, display: Display) -> Outcome:
    """Start or continue `run` and stay with it until it is complete or asked to stop (SIGTERM, Ctrl-C).

    Raises:
        RunIsActive: another start of it is alive.
        RunError: it cannot go on; the message says why.
    """
    owner = Owner.here(time.time())
    attempt = claim(run.store, owner=owner)
    try:
        if (done := _steps_done(run)) >= run.recipe.total_steps:
            return Outcome(DONE, done)
        return _supervise(run, attempt, owner, display)
    finally:
        end_all(run.store, owner, time.time())


def _steps_done(run: Run) -> int:
    """Steps in the newest checkpoint; 0 if there is none. Every rank verifies it before it is used."""
    good = newest_good(run.store, Alone(), full=False)
    return good.manifest.step if good else 0


def _supervise(run: Run, attempt: Attempt, owner: Owner, display: Display) -> Outcome:
    resources = plan_resources(run.recipe)
    with _ray(resources), tempfile.TemporaryDirectory(prefix="maskfleet-ray-train-") as scratch:
        monitor = start_monitor(attempt, owner)
        feed = start_feed(_feed_config(run, resources))
        assignment = Assignment(run.store.uri, monitor, feed)
        follow = Follow(monitor, Guard(run, monitor, display.note), display)
        with _stop_signals(monitor, display):
            while True:
                without = follow.status.without
                name = f"a{attempt.number:06d}-{os.getpid()}-{len(without)}"
                error = follow.fit(trainer(assignment, resources, scratch, name, without))
                if follow.status.without == without:  # ended for good, whichever way
                    return _outcome(run, follow.status, error)


def _outcome(run: Run, status: Status, error: BaseException | None) -> Outcome:
    if status.fatal is not None:
        raise RunError(status.fatal.problem, remedy=status.fatal.remedy) from error
    if isinstance(error, TrainingFailedError):
        operator_event(run.store, "failed", time.time(), reason=str(error)[:2000])
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


def _feed_config(run: Run, resources: Resources) -> FeedConfig:
    """Row counts are kept with the run, so that only its first start pays for counting them."""
    memory = int(run.recipe.data_service.memory)
    return FeedConfig(workers=resources.data_workers, memory=memory, cache=run.store.at("cache").uri)


@contextmanager
def _ray(resources: Resources) -> Iterator[None]:
    """Join the cluster in RAY_ADDRESS, or start one on this machine for the length of the run.

    Ranks tell the operator what matters through the monitor; the rest of what they print stays in Ray's log folder.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.5")  # how soon a dead rank is noticed
    local = {} if os.environ.get("RAY_ADDRESS") else _local_cluster(resources)
    ray.init(logging_level=logging.ERROR, log_to_driver=False, **local)
    try:
        yield
    finally:
        ray.shutdown()


def _local_cluster(resources: Resources) -> dict[str, Any]:
    return {
        "address": "local",  # without it, Ray would join any cluster it finds on the machine
        "num_cpus": resources.local_cpus,
        "include_dashboard": False,
        "object_store_memory": resources.object_store_bytes,
    }


@contextmanager
def _stop_signals(monitor: Any, display: Display) -> Iterator[None]:
    """SIGTERM and Ctrl-C ask for a commit and a clean end; a second Ctrl-C ends at once. Set after ray.init, which
    installs handlers of its own."""
    asked = threading.Event()

    def ask(number: int, frame: FrameType | None) -> None:
        if asked.is_set() and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not asked.is_set():
            asked.set()
            display.note(
                f"{signal.Signals(number).name}: finishing this step, saving, then ending with code {REQUEUE}"
            )
            monitor.stop.remote()

    before = {number: signal.signal(number, ask) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
