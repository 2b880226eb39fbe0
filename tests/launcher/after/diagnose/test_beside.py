"""Commits evaluated beside training: the newest first, an evaluator that is killed, the end that waits only so long."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import ray

from data_service.service.ray_internals import start_ray
from launcher.after.diagnose.evaluators import CommitEvaluator, evaluate_commits, is_evaluation_pending
from launcher.observe.inspect.status import read_status, status_lines
from launcher.runtime.run.evaluations import evaluated_commits
from launcher.runtime.run.outline import open_outline
from launcher.runtime.run.record import open_run
from tests.support.runs.observer import title
from tests.support.runs.small_runs import events, new_run, operate
from tests.support.runs.untrained import Committing
from tests.support.tasks.small_tasks import task_files

pytestmark = pytest.mark.cluster

SETTINGS = "evaluation={every: {steps: 7}, samples: 20, tasks: [heldout, {heldout: {rows: 20}}]}"
WAIT_S = 240.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray with one core; its processes are as urgent as this one."""
    start_ray(num_cpus=1)
    yield
    ray.shutdown()


def wait_for(condition: Callable[[], object]) -> None:
    tick, deadline = threading.Event(), time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        tick.wait(0.05)


def steps(uri: str) -> list[int]:
    """Of commits of which all was measured."""
    run = open_run(uri)
    wanted = len(run.recipe.evaluation.tasks)
    return [one.commit.step for one in evaluated_commits(run.store) if len(one.results) == wanted]


def evaluators() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "EvaluatorProcess" in title(child)]


@pytest.mark.long
def test_the_newest_comes_next_and_what_fails_is_told_once(cluster: None, inputs: Path, tmp_path: Path) -> None:
    word, _ = task_files(str(tmp_path))
    tasks = f"[heldout, {{probe: {{task: '{word}'}}}}]"
    evaluation = f"evaluation={{every: {{steps: 7}}, samples: 20, tasks: {tasks}}}"
    uri = new_run(inputs, str(tmp_path / "run"), evaluation)
    (tmp_path / "train.tsv").unlink()
    committing, notes = Committing(uri), list[str]()
    committing.commit(3)
    beside = CommitEvaluator(open_run(uri), notes.append, poll_s=0.1, idle=False)
    try:
        wait_for(evaluators)
        committing.commit(6)
        committing.commit(9)  # both before the first is evaluated: a process takes seconds to import torch
        beside.wait_for_last_commit(threading.Event(), WAIT_S)
    finally:
        beside.close()
    assert [one.commit.step for one in evaluated_commits(open_run(uri).store)] == [3, 9]
    assert [event["step"] for event in events(uri, "evaluated")] == [3, 9]
    assert [event["steps"] for event in events(uri, "evaluation_skipped")] == [[6]]
    assert [event["step"] for event in events(uri, "evaluation_failed")] == [3]
    assert sum("train.tsv" in note for note in notes) == 1
    found = read_status(open_outline(uri), time.time())
    assert "train.tsv" in str(found.evaluation_problem)
    assert any("train.tsv" in line for line in status_lines(found, time.time()))


@pytest.mark.long
def test_the_end_waits_for_the_last_commit_only_so_long(cluster: None, inputs: Path, tmp_path: Path) -> None:
    uri = new_run(inputs, str(tmp_path / "run"), SETTINGS)
    Committing(uri).commit(open_run(uri).recipe.total_steps)
    run, notes = open_run(uri), list[str]()
    assert is_evaluation_pending(run)
    with evaluate_commits(run, notes.append, threading.Event(), patience_s=0.0):
        pass
    assert is_evaluation_pending(run), "a process cannot even start in that time"
    assert " command" in notes[-1]
    with evaluate_commits(run, notes.append, threading.Event()):
        pass
    assert not is_evaluation_pending(run)
    assert steps(uri) == [14]


def test_without_tasks_nothing_is_done(fresh_run: str) -> None:
    """Not even Ray is asked for."""
    Committing(fresh_run).commit(3)
    run = open_run(fresh_run)
    assert not is_evaluation_pending(run)
    with evaluate_commits(run, lambda text: None, threading.Event()):
        pass
    assert list(evaluated_commits(run.store)) == []
    operate(fresh_run, "evaluation.tasks=[heldout]")
    assert is_evaluation_pending(open_run(fresh_run)), "it may be asked for at any restart"
