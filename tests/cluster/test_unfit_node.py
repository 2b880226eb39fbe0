"""A machine that fails the preflight gets no ranks: others are taken, or the run ends and says why."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.cluster.conftest import STORE_BYTES
from tests.support.runs import small_runs
from tests.support.runs.train_command import committed, output, training

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]

SETTINGS = (
    "phases=[{steps: 40, length: 32, batch: {sequences: 12}}]",
    "checkpoint={every: {steps: 20}, keep_last: 2}",
    "evaluation={every: {steps: 40}, samples: 20}",
    "trainers=2",
)


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
    uri = small_runs.new_run(tmp_path, "run", *SETTINGS)
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
