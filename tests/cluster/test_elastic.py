"""A machine is lost: training goes on with fewer ranks. It comes back: the run takes more again. The losses stay."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from ray._private.node import Node
from ray.cluster_utils import Cluster

from tests.cluster.conftest import STORE_BYTES
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs
from tests.support.runs.observer import title
from tests.support.runs.train_command import await_commit, committed, output, training, wait_for

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

SETTINGS = (
    "phases=[{steps: 2000, length: 32, batch: {sequences: 96}}]",  # a long step: few of them while machines are lost
    "optimizer.adamw.lr=1.0e-4",
    "checkpoint={every: {steps: 10}, keep_last: 3}",
    "evaluation={every: {steps: 2000}, samples: 20}",
    "trainers={min: 1, max: 3, wait: 15, grow: 10}",
)
MEMORY = {"object_store_memory": STORE_BYTES}


@pytest.fixture
def cluster(head: Cluster) -> Cluster:
    """A head without places, and a machine with two."""
    head.add_node(num_cpus=2, **MEMORY)
    return head


def test_fewer_ranks_then_more_again(tmp_path: Path, cluster: Cluster) -> None:
    small_runs.prepare_corpus(tmp_path, documents=300)
    nodes = cluster.list_all_nodes()
    uri = small_runs.new_run(tmp_path, "run", *SETTINGS)
    with training(uri) as process:
        wait_for(process, lambda: any(processes(node, "ray::Feed") for node in nodes))
        lost = cluster.add_node(num_cpus=1, **MEMORY)  # only now: the command itself must not be on it
        wait_for(process, lambda: committed(uri) >= 10)
        assert processes(lost, "ray::RankProcess as rank")
        cluster.remove_node(lost, allow_graceful=False)
        wait_for(process, lambda: worlds(uri) == [(3, 2)])
        await_commit(process, uri)
        repeated = small_runs.history(uri).repeated
        cluster.add_node(num_cpus=1, **MEMORY)
        wait_for(process, lambda: worlds(uri) == [(3, 2), (2, 3)])
        await_commit(process, uri)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75, output(process)
    steps = committed(uri)
    events = small_runs.history(uri).events
    assert [event["world"] for event in events if event["kind"] in ("start", "resume")] == [3, 2, 3]
    stayed = [event["processes"].get("stayed", 0) for event in events if event["kind"] == "underway"]
    assert stayed == [0, 2, 2], "those on the machine that is there stay"
    assert "no place for 3 ranks within 15 s" in [event.get("cause") for event in events]
    grown = [event for event in events if event["kind"] == "resume"][-1]
    assert grown["memory"], "the ranks did not wait for the store"
    assert small_runs.history(uri).repeated == repeated, "no step was lost to the enlargement"

    calm = small_runs.new_run(tmp_path, "calm", *SETTINGS)
    finish(calm, 2, stop_at=steps)
    assert small_runs.ledger(uri) == small_runs.ledger(calm)
    assert small_runs.digests(uri) == small_runs.digests(calm)
    difference = np.abs(np.subtract(small_runs.losses(uri), small_runs.losses(calm))).max()
    print(f"{steps} steps; losses within {difference:.1e} nats of 2 undisturbed ranks")
    assert difference <= 1e-5


def test_a_node_that_is_drained_is_left_before_it_goes(tmp_path: Path, cluster: Cluster) -> None:
    """As spot instances are taken: the cluster is told, and ends the node some time later."""
    small_runs.prepare_corpus(tmp_path, documents=300)
    nodes = cluster.list_all_nodes()
    uri = small_runs.new_run(tmp_path, "run", *SETTINGS)
    with training(uri) as process:
        wait_for(process, lambda: any(processes(node, "ray::Feed") for node in nodes))
        going = cluster.add_node(num_cpus=1, **MEMORY)
        wait_for(process, lambda: committed(uri) >= 10)
        assert processes(going, "ray::RankProcess as rank")
        drain(going)
        wait_for(process, lambda: worlds(uri) == [(3, 2)])
        await_commit(process, uri)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75, output(process)
    events = small_runs.history(uri).events
    kinds = [event["kind"] for event in events]
    assert "death" not in kinds
    (pause,) = (event for event in events if event["kind"] == "pause")
    assert going.node_id[:8] in pause["reason"]
    assert "memory" not in events[kinds.index("resume")], "they waited for another machine before they went on"
    assert small_runs.history(uri).repeated == 0, "no step was lost to it"
    small_runs.losses(uri)  # none is missing


def drain(node: Node) -> None:
    reason = ("--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the cloud wants it back")
    ray = str(Path(sys.executable).with_name("ray"))
    command = [ray, "drain-node", "--node-id", node.node_id, *reason, "--deadline-remaining-seconds", "120"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def worlds(uri: str) -> list[tuple[int, int]]:
    """The changes so far. They are the driver's to record: attempt 0."""
    segments = sorted(Path(uri, "events", "a000000").glob("*.jsonl"))
    events = [json.loads(line) for segment in segments for line in segment.read_text().splitlines()]
    return [(event["from"], event["to"]) for event in events if event["kind"] == "world"]


def processes(node: Node, name: str) -> list[psutil.Process]:
    """What a node's raylet has started under that name."""
    (raylet,) = node.all_processes["raylet"]
    children = psutil.Process(raylet.process.pid).children(recursive=True)
    return [child for child in children if title(child).startswith(name)]
