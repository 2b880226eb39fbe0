"""A machine on which ranks die again and again is left out, and the run goes on on the others."""

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

SETTINGS = (
    "phases=[{steps: 400, length: 32, batch: {sequences: 12}}]",
    "checkpoint={every: {steps: 20}, keep_last: 3}",
    "evaluation={every: {steps: 400}, samples: 20}",
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
    uri = small_runs.new_run(tmp_path, "run", *SETTINGS)
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
