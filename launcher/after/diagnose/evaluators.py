"""Evaluates a run's commits (committed checkpoints) while it trains, in a Ray actor that training never waits for.

A thread of the driver looks for new commits and hands the newest one to the evaluator. The actor reserves no GPU and no
CPU, and runs on idle cores. It reads weights from the run's store and writes results there; ranks do not know of it. If
it dies, fails or is slow, that is recorded and training continues.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.exceptions import RayError

from checkpoints.layout import CheckpointName
from checkpoints.listing import list_committed
from data_service.store.errors import StoreError
from launcher.after.diagnose.evaluator_process import EvaluatorProcess
from launcher.runtime.cluster.nodes import dead_process
from launcher.runtime.cluster.operator_log import OperatorLog
from launcher.runtime.run.evaluations import is_unevaluated
from launcher.runtime.run.record import Run

EVALUATION_RESOURCE = "evaluation"
"""Name of a resource of Ray. If the operator gives it to a node, evaluators run on that node, away from the ranks."""
FINISH_TIMEOUT_S = 300.0
"""Time limit, in seconds, of the wait for the last commit's evaluation at the end of training."""

_COMMIT_POLL_INTERVAL_S = 5.0
_MAX_TRIES = 2  # attempts to evaluate one commit
_LOG_CLOSE_TIMEOUT_S = 5.0  # time limit for writing the last events of the log

Note = Callable[[str], None]  # shows a line to the operator


class CommitEvaluator:
    """A thread that evaluates a run's commits until `close`. If several commits wait, only the newest is evaluated.

    Args:
        note: function that shows a line to the operator.
        poll_s: seconds between two searches for commits.
        idle: whether the evaluator only uses CPU time that no other process needs.
    """

    def __init__(self, run: Run, note: Note, *, poll_s: float = _COMMIT_POLL_INTERVAL_S, idle: bool = True) -> None:
        self._run, self._note, self._poll_s, self._idle = run, note, poll_s, idle
        self._log = OperatorLog(run.store, note)
        # Commits that are evaluated, given up or skipped; None before the first search.
        self._done: set[CheckpointName] | None = None
        self._tries = Counter[CheckpointName]()
        self._told: set[str] = set()  # failures and warnings that were shown already
        self._actor: Any = None
        # `_last` is set when no further commit will come, or by `close`.
        self._last, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._evaluate_until_stopped, name="evaluation", daemon=True)
        self._thread.start()

    def wait_for_last_commit(self, stop_requested: threading.Event, patience_s: float = FINISH_TIMEOUT_S) -> None:
        """Wait until the last commit is evaluated, for at most the given seconds, or until a stop is requested."""
        self._last.set()
        deadline = time.monotonic() + patience_s
        self._thread.join(1.0)
        if self._thread.is_alive():
            self._note(f"the last checkpoint is being evaluated; waiting for it {patience_s:.0f} s at most")
        while self._thread.is_alive() and not stop_requested.is_set():
            if time.monotonic() > deadline:
                self._note("the last checkpoint is not evaluated yet: give the same command again to evaluate it")
                return
            self._thread.join(0.25)

    def close(self) -> None:
        """Stop at once, even during an evaluation."""
        self._closed.set()
        self._last.set()
        self._end_process()
        self._log.close(_LOG_CLOSE_TIMEOUT_S)

    def _evaluate_until_stopped(self) -> None:
        """Evaluate commits until `close`, or until the last one is done. Errors here never stop training."""
        last = False
        while not last and not self._closed.is_set():
            # Read the flag first, so that the last search finds every commit made before `wait_for_last_commit`.
            last = self._last.is_set()
            try:
                while not self._closed.is_set() and dead_process() is None and (mark := self._newest_pending_commit()):
                    self._try_evaluation(mark)
            except StoreError as error:
                self._warn_once("store", f"evaluation waits for the run's store: {error.problem}")
            except Exception as error:
                self._warn_once("failed", f"evaluation failed: {type(error).__name__}: {str(error)[:300]}")
                self._end_process()
            self._last.wait(self._poll_s)

    def _newest_pending_commit(self) -> CheckpointName | None:
        """Return the newest commit that is not evaluated yet (None: all are), and skip older ones. The first call
        counts all commits but the newest as done by earlier commands."""
        marks = sorted(list_committed(self._run.store))
        if self._done is None:
            self._done = set(marks[:-1])
        waiting = [mark for mark in marks if mark not in self._done]
        if waiting[:-1]:
            self._skip_commits(waiting[:-1], "a newer checkpoint was committed before their evaluation began")
        return waiting[-1] if waiting else None

    def _try_evaluation(self, commit: CheckpointName) -> None:
        """Evaluate a commit, and record how that ended. If the actor fails too often, give the commit up."""
        self._tries[commit] += 1
        try:
            outcome = self._evaluate(commit)
        except RayError as error:
            self._end_process()
            self._report_failure(commit, "the evaluator", _first_line_of_cause(error))
            if self._tries[commit] >= _MAX_TRIES:
                self._mark_done(commit)
            return
        if outcome is not None:
            self._mark_done(commit)
            self._record_outcome(commit, outcome)

    def _evaluate(self, commit: CheckpointName) -> dict[str, Any] | None:
        """Evaluate a commit and return the outcome; None if the evaluation is stopped before its end."""
        if self._actor is None:
            self._actor = _start_evaluator(idle=self._idle)
        answer = self._actor.evaluate.remote(self._run.uri, self._run.recipe, commit)
        while not ray.wait([answer], timeout=self._poll_s)[0]:
            if self._closed.is_set() or dead_process() is not None:
                return None
        found: dict[str, Any] = ray.get(answer)
        return found

    def _record_outcome(self, commit: CheckpointName, outcome: dict[str, Any]) -> None:
        if outcome["gone"]:
            self._skip_commits([commit], "it was deleted before it could be read")
            return
        for task, reason in outcome["failed"].items():
            self._report_failure(commit, task, reason)
        if outcome["computed"]:
            about = {"seconds": round(outcome["seconds"], 2), "failed": len(outcome["failed"])}
            self._log.event("evaluated", step=commit.step, of=commit.attempt, tasks=outcome["computed"], **about)

    def _report_failure(self, commit: CheckpointName, subject: str, reason: str) -> None:
        """Record and show a failure. A failure that repeats with later commits is shown once."""
        if self._closed.is_set() or f"{subject}: {reason}" in self._told:
            return
        self._told.add(f"{subject}: {reason}")
        self._log.event("evaluation_failed", step=commit.step, what=subject, reason=reason)
        self._note(f"evaluation of step {commit.step:,}: {subject}: {reason}; training goes on")

    def _skip_commits(self, commits: list[CheckpointName], reason: str) -> None:
        for mark in commits:
            self._mark_done(mark)
        self._log.event("evaluation_skipped", steps=[mark.step for mark in commits], reason=reason)

    def _mark_done(self, commit: CheckpointName) -> None:
        assert self._done is not None  # set by the first search for commits
        self._done.add(commit)

    def _warn_once(self, subject: str, text: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            self._note(f"{text}; training goes on")

    def _end_process(self) -> None:
        """End the process of the actor, unless Ray's own processes have died."""
        actor, self._actor = self._actor, None
        if actor is not None and dead_process() is None:
            with suppress(RayError):
                ray.kill(actor)


def _start_evaluator(*, idle: bool) -> Any:
    """Start the evaluator as a restartable actor: if a node runs out of memory, Ray kills it before any rank."""
    has_place = any(node["Alive"] and node["Resources"].get(EVALUATION_RESOURCE) for node in ray.nodes())
    resources = {EVALUATION_RESOURCE: 0.01} if has_place else {}
    options = {"num_cpus": 0, "num_gpus": 0, "resources": resources, "max_restarts": -1}
    return ray.remote(EvaluatorProcess).options(**options).remote(idle=idle)


def _first_line_of_cause(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[0][:300] if text else ''}"


def is_evaluation_pending(run: Run) -> bool:
    """Return whether the run's newest commit is still to be evaluated. Raises StoreError."""
    tasks = run.recipe.evaluation.tasks
    marks = list_committed(run.store) if tasks else []
    return bool(marks) and is_unevaluated(run.store, marks[0], tasks)


@contextmanager
def evaluate_commits(
    run: Run, note: Note, stop_requested: threading.Event, patience_s: float = FINISH_TIMEOUT_S
) -> Iterator[None]:
    """Evaluate the run's commits inside the `with` block, if its recipe asks for that. Call it when Ray is connected.

    If training is complete at the end of the block, wait for the evaluation of the last commit, at most `patience_s`
    seconds; otherwise do not wait.
    """
    if not run.recipe.evaluation.tasks:
        yield
        return
    evaluator = CommitEvaluator(run, note)
    try:
        yield
        if _is_training_complete(run) and not stop_requested.is_set():
            evaluator.wait_for_last_commit(stop_requested, patience_s)
    finally:
        evaluator.close()


def _is_training_complete(run: Run) -> bool:
    try:
        marks = list_committed(run.store)
    except StoreError:  # the store does not answer, so there is nothing to wait for
        return False
    return bool(marks) and marks[0].step >= run.recipe.total_steps
