"""Machines that are no use: one on which ranks die again and again, one that fails the preflight, one that never joins.
Others are taken, or the run ends and says why."""

import re
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psutil
import pytest
from ray._private.node import Node
from ray.cluster_utils import Cluster

from launcher.runtime.policies.failures import NODE_FAILURE_LIMIT
from tests.cluster.conftest import STORE_BYTES
from tests.support.runs import small_runs
from tests.support.runs.observer import title
from tests.support.runs.train_command import committed, output, training, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]


def settings(steps: int) -> tuple[str, ...]:
    return (
        f"phases=[{{steps: {steps}, length: 32, batch: {{sequences: 12}}}}]",
        "checkpoint={every: {steps: 20}, keep_last: 3}",
        f"evaluation={{every: {{steps: {steps}}}, samples: 20}}",
        "trainers=2",
    )


def ranks_on(node: Node) -> list[psutil.Process]:
    """The ranks that a node's raylet has started."""
    (raylet,) = node.all_processes["raylet"]
    children = psutil.Process(raylet.process.pid).children(recursive=True)
    return [child for child in children if title(child).startswith("ray::RankProcess as rank")]


def dies_next(uri: str, step: int, node: Node) -> bool:
    return committed(uri) >= step and bool(ranks_on(node))


def test_a_bad_node_is_left_out(head: Cluster, tmp_path: Path) -> None:
    bad = head.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    small_runs.prepare_corpus(tmp_path)
    uri = small_runs.new_run(tmp_path, "run", *settings(400))
    with training(uri) as process:
        for failure in range(1, NODE_FAILURE_LIMIT + 1):
            wait_for(process, partial(dies_next, uri, 20 * failure, bad))
            if failure == NODE_FAILURE_LIMIT:
                good = head.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
            ranks_on(bad)[0].kill()
        wait_for(process, lambda: len(ranks_on(good)) == 2)
        assert not ranks_on(bad)
        assert process.wait(300) == 0, output(process)
    assert committed(uri) == 400


@contextmanager
def few_files() -> Iterator[None]:
    """Processes started within may have 1,000 files open: enough for Ray on a small machine, and too few for us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_run_ends_and_says_why_or_takes_another_machine(tmp_path: Path, head: Cluster) -> None:
    """The unfit machine has so many places that Ray takes it first."""
    with few_files():
        head.add_node(num_cpus=8, object_store_memory=STORE_BYTES)
    small_runs.prepare_corpus(tmp_path)
    uri = small_runs.new_run(tmp_path, "run", *settings(40))
    with training(uri) as process:
        assert process.wait(240) == 2
        shown = output(process)
    assert "1,000" in shown
    assert "ulimit -n" in shown
    (refused,) = small_runs.events(uri, "unfit")
    assert refused["verdict"] == "failure"
    assert committed(uri) == 0

    good = head.add_node(num_cpus=2, object_store_memory=STORE_BYTES)
    with training(uri) as process:
        assert process.wait(240) == 0, output(process)
        assert " out" in output(process)
    events = small_runs.history(uri).events
    unfit = [event["node"] for event in events if event["kind"] == "unfit"]
    fit = [(event["node"], event["verdict"]) for event in events if event["kind"] == "preflight"]
    assert unfit == [refused["node"]] * 2
    assert [node for node, _ in fit] == [good.node_id]
    assert fit[0][1] != "failure"
    assert committed(uri) == 40


def test_a_node_that_does_not_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASKFLEET_JOIN_SECONDS", "1")
    small_runs.prepare_corpus(tmp_path)
    uri = small_runs.new_run(tmp_path, "run")
    with training(uri, "--nodes", "2") as process:
        assert process.wait(120) == 75  # the next try may find it
        assert re.search(r"\b1 of 2 nodes\b.*\b1 s\b", output(process))
    assert committed(uri) == 0


def test_waiting_for_a_node_ends_as_soon_as_it_is_asked_to(tmp_path: Path) -> None:
    small_runs.prepare_corpus(tmp_path)
    uri = small_runs.new_run(tmp_path, "run")
    with training(uri, "--nodes", "2") as process:
        assert process.stdout is not None
        assert any("nodes: 1 of 2 " in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75, output(process)
    assert [event["reason"] for event in small_runs.events(uri, "stop")] == ["SIGTERM"]
