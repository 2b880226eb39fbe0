"""A node that a job should have, and that does not join its Ray cluster, is said; the run does not begin without it."""

import re
import signal
from pathlib import Path

import pytest

from tests.support.runs import small_runs
from tests.support.runs.train_command import committed, output, training

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(200)]


@pytest.mark.long
def test_a_node_that_does_not_join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASKFLEET_JOIN_SECONDS", "1")
    small_runs.prepare_corpus(tmp_path)
    uri = small_runs.new_run(tmp_path, "run")
    with training(uri, "--nodes", "2") as process:
        assert process.wait(120) == 75  # the next try may find it
        assert re.search(r"\b1 of 2 nodes\b.*\b1 s\b", output(process))
    assert committed(uri) == 0


@pytest.mark.long
def test_waiting_for_a_node_ends_as_soon_as_it_is_asked_to(tmp_path: Path) -> None:
    small_runs.prepare_corpus(tmp_path)
    uri = small_runs.new_run(tmp_path, "run")
    with training(uri, "--nodes", "2") as process:
        assert process.stdout is not None
        assert any("nodes: 1 of 2 " in line for line in process.stdout)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75, output(process)
    assert [event["reason"] for event in small_runs.events(uri, "stop")] == ["SIGTERM"]
