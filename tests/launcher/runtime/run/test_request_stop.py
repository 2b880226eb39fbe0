"""Stopping a run through its store: the start that runs is stopped, no other one; and through Ray, a real training."""

import json
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from checkpoints.attempt import Attempt, Owner, claim, end_newest_attempt
from checkpoints.ownership import find_stop_request
from data_service.store.base import Store
from data_service.store.open import open_store
from launcher.exit_codes import REPEAT, STOPPED
from launcher.runtime.cluster import stop_requests
from launcher.runtime.cluster.stop_requests import StopRequests
from launcher.runtime.run import request_stop as run_stop
from launcher.runtime.run.history import read_history
from tests.support.checks.command import maskfleet
from tests.support.runs import small_runs
from tests.support.runs.listeners import SECRET, serving_webhook
from tests.support.runs.train_command import committed, output, training, wait_for
from tests.support.stores.faulty import silent_for

NOW = 1_700_000_000.0
ELSEWHERE = Owner(host="node7", processes="another machine", pid=12, started=6_033_449, claimed=NOW)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setattr(stop_requests, "STOP_POLL_S", 0.01)
    return open_store(tmp_path / "run")


def started(store: Store, owner: Owner = ELSEWHERE) -> Attempt:
    return claim(store, owner=owner, clock=lambda: NOW)


@contextmanager
def listening(attempt: Attempt, notes: list[str]) -> Iterator[StopRequests]:
    stopping = StopRequests(notes.append)
    with stopping, stopping.while_ranks_train(), stopping.watching_store(attempt):
        yield stopping


def test_a_request_reaches_the_start_that_runs(store: Store) -> None:
    notes: list[str] = []
    with listening(started(store), notes) as stopping:
        asked = run_stop.ask_to_stop(store, NOW + 5)
        assert asked is not None
        assert (asked.attempt, asked.owner.host) == (1, "node7")
        assert stopping.asked.wait(10)
    assert stopping.reason == f"stop requested by {run_stop.user_at_host()}"
    assert stopping.code == STOPPED
    assert f"code {STOPPED}" in notes[0]
    (event,) = read_history(store).events
    assert (event["kind"], event["attempt"], event["of"]) == ("stop_requested", 0, 1)


def test_it_reaches_the_ranks_started_again_meanwhile(store: Store) -> None:
    """The command claims an attempt for every group of ranks; a request for any of them is for the command."""
    first = started(store)
    started(store)
    run_stop.ask_to_stop(store, NOW + 5)
    started(store)
    with listening(first, []) as stopping:
        assert stopping.asked.wait(10)


def test_a_later_start_is_not_stopped_by_it(store: Store) -> None:
    first = started(store)
    run_stop.ask_to_stop(store, NOW + 5)
    assert find_stop_request(store, first.number) is not None
    end_newest_attempt(store, ELSEWHERE, NOW + 6)
    second = started(store)
    assert find_stop_request(store, second.number) is None
    run_stop.ask_to_stop(store, NOW + 7)
    assert find_stop_request(store, second.number) is not None


@pytest.mark.parametrize("how", ["never started", "ended", "silent"])
def test_where_nothing_runs_nothing_is_asked(store: Store, how: str) -> None:
    if how != "never started":
        started(store)
    if how == "ended":
        end_newest_attempt(store, ELSEWHERE, NOW + 1)
    if how == "silent":
        silent_for(store.uri, 61)
    before = [entry.key for entry in store.list()]
    asked = run_stop.ask_to_stop(store, NOW + 1000)
    assert (asked and asked.state) == {"ended": "ended", "silent": "dead"}.get(how)
    assert [entry.key for entry in store.list()] == before


def test_waiting_ends_with_the_command(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not with its attempt: its ranks may be started once more before they stop."""
    started(store)
    asked = run_stop.ask_to_stop(store, NOW + 1)
    assert asked is not None
    times = iter([NOW + 2, NOW + 3, NOW + 4])

    def clock() -> float:
        now = next(times)
        if now == NOW + 3:
            started(store)
        if now == NOW + 4:
            end_newest_attempt(store, ELSEWHERE, now)
        return now

    monkeypatch.setattr(run_stop, "_POLL_S", 0.0)
    found = run_stop.wait_for_end(store, asked, clock)
    assert (found.attempt, found.state, found.ended) == (2, "ended", NOW + 4)


def test_signals_ask_too_and_a_second_ctrl_c_ends_at_once(store: Store) -> None:
    notes: list[str] = []
    with listening(started(store), notes) as stopping:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        assert stopping.asked.wait(10)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (stopping.reason, stopping.code) == ("SIGTERM", REPEAT)
    (note,) = notes
    assert re.match(rf"SIGTERM: .*\bcode {REPEAT}$", note)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_a_training_on_ray_is_stopped_from_outside(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It commits and ends with a code that is not tried again. What it does is shown meanwhile and afterwards, and
    posted as it happens."""
    endless = "phases=[{steps: 1000000, length: 32, batch: {sequences: 12}}]"
    settings = (endless, "checkpoint={every: {steps: 20}}", "events.webhook_env=MASKFLEET_HOOK")
    uri = small_runs.new_run(inputs, str(tmp_path / "run"), *settings)
    assert "was never started" in maskfleet("runs", "stop", uri)
    with serving_webhook() as server:
        monkeypatch.setenv("MASKFLEET_HOOK", server.url)
        with training(uri) as process:
            wait_for(process, lambda: committed(uri) >= 20)
            status = json.loads(maskfleet("runs", "status", uri, "--json"))
            assert (status["state"], status["pid"]) == ("running", process.pid)
            assert "stopped at step" in maskfleet("runs", "stop", uri, "--wait")
            assert process.wait(30) == STOPPED, output(process)
            assert SECRET not in output(process)
    history = small_runs.history(uri)
    (stopped,) = (event for event in history.events if event["kind"] == "stop")
    (asked,) = (event for event in history.events if event["kind"] == "stop_requested")
    assert stopped["step"] == committed(uri) == len(history.steps)
    assert "stop" in stopped["reason"]
    assert stopped["time"] - asked["time"] < 20
    posted = [body["kind"] for body in server.bodies]
    assert (posted[0], posted[-1]) == ("start", "stop")
    assert sorted(posted) == ["start", "stop", "stop_requested"]
    assert "is not running" in maskfleet("runs", "stop", uri)
    assert "stopped" in maskfleet("runs", "status", uri)
