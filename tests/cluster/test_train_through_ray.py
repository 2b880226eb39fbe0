"""The whole command on a real Ray: ranks, data workers, the feed and everything at once are killed; nothing changes."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import small_runs

from checkpoints.listing import committed as commits
from data_service.store.open import open_store

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SETTINGS = (
    "phases=[{steps: 240, length: 32, batch: {sequences: 12}}]",
    "checkpoint={every: {steps: 20}, keep_last: 3}",
    "evaluation={every: {steps: 80}, samples: 20}",
)
STEPS = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    small_runs.prepare_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    uri = small_runs.new_run(folder, "undisturbed", *SETTINGS)
    with training(uri) as process:
        assert process.wait(300) == 0, output(process)
    return uri


def test_whatever_is_killed_nothing_changes(folder: Path, undisturbed: str) -> None:
    uri = small_runs.new_run(folder, "killed", *SETTINGS)
    with training(uri) as process:
        wait_for(process, lambda: committed(uri) >= 20)
        kill(process, "ray::RayTrainWorker")  # a rank
        wait_for(process, lambda: committed(uri) >= 80)
        kill(process, "ray::Feed")  # the owner of all data in flight
        kill(process, "ray::IDLE", optional=True)  # whoever built it
        wait_for(process, lambda: committed(uri) >= 140)
        kill_everything(process)
    with training(uri) as process:
        assert process.wait(300) == 0, output(process)
    same_outcome(uri, undisturbed)
    kinds = [event["kind"] for event in small_runs.history(uri).events]
    assert kinds.count("resume") == 2
    assert kinds.count("start") == 1


def test_sigterm_commits_and_asks_for_a_requeue(folder: Path, undisturbed: str) -> None:
    uri = small_runs.new_run(folder, "stopped", *SETTINGS)
    with training(uri) as process:
        wait_for(process, lambda: committed(uri) >= 20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 75, output(process)
    stopped_at = committed(uri)
    assert 20 <= stopped_at < STEPS
    with training(uri) as process:
        assert process.wait(300) == 0, output(process)
    resumed = [event["step"] for event in small_runs.history(uri).events if event["kind"] == "resume"]
    assert resumed == [stopped_at], "no step was lost"
    same_outcome(uri, undisturbed)


def test_two_starts_at_once(folder: Path) -> None:
    """One works; the other says why it does not, at once, and harms nothing."""
    endless = "phases=[{steps: 1000000, length: 32, batch: {sequences: 12}}]"
    uri = small_runs.new_run(folder, "twice", *SETTINGS, endless)
    with training(uri) as first:
        wait_for(first, lambda: committed(uri) >= 20)
        with training(uri) as second:
            assert second.wait(120) == 2
            text = output(second)
        assert "is running" in text
        assert str(first.pid) in text
        assert "Traceback" not in text
        before = committed(uri)
        wait_for(first, lambda: committed(uri) > before)


def test_damaged_data_ends_the_run_with_its_name(folder: Path, tmp_path: Path) -> None:
    """No restart can cure it: the command ends, quickly, and names shard and block."""
    small_runs.prepare_corpus(tmp_path)
    uri = small_runs.new_run(tmp_path, "damaged", *SETTINGS)
    shard = next((tmp_path / "corpus").rglob("*.tar"))
    data = bytearray(shard.read_bytes())
    data[1000] ^= 1  # inside the first block: behind the blocks a tar has padding, which training never reads
    shard.write_bytes(data)
    with training(uri) as process:
        assert process.wait(180) == 2
        text = output(process)
    assert shard.name in text
    assert "Traceback" not in text


@contextmanager
def training(uri: str) -> Iterator["subprocess.Popen[str]"]:
    """`maskfleet train` in a process group of its own; whatever is left of it is killed at the end."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("maskfleet")), "train", uri],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        kill_everything(process)


def output(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.read()


def committed(uri: str) -> int:
    """Step of the newest checkpoint, 0 if there is none."""
    return max((mark.step for mark in commits(open_store(uri))), default=0)


def wait_for(process: "subprocess.Popen[str]", condition: Callable[[], bool], timeout: float = 240) -> None:
    """Until `condition` holds; fails at once if the command ends before that."""
    tick, deadline = threading.Event(), time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, output(process)
        assert time.monotonic() < deadline
        tick.wait(0.05)


def kill(process: "subprocess.Popen[str]", name: str, *, optional: bool = False) -> None:
    """SIGKILL to one descendant whose title begins with `name`."""
    found = [child for child in descendants(process) if title(child).startswith(name)]
    assert found or optional, sorted(title(child) for child in descendants(process))
    for child in found[:1]:
        child.kill()


def kill_everything(process: "subprocess.Popen[str]") -> None:
    for child in (*descendants(process), process):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait()


def descendants(process: "subprocess.Popen[str]") -> list[psutil.Process]:
    try:
        return psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return ""


def same_outcome(uri: str, undisturbed: str) -> None:
    assert small_runs.losses(uri) == small_runs.losses(undisturbed)
    assert small_runs.ledger(uri) == small_runs.ledger(undisturbed)
    assert small_runs.digests(uri) == small_runs.digests(undisturbed)
    assert small_runs.final_state(uri, STEPS) == small_runs.final_state(undisturbed, STEPS)
