"""Events posted to a real HTTP server: one that answers, one that is down, one that hangs, one that refuses."""

import socket
import threading
import time
import traceback
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from checkpoints.attempt import Attempt, claim
from data_service.store.base import Store
from data_service.store.open import open_store
from launcher.errors import RecipeError
from launcher.observe.sinks.process import SinkProcess, make_publish_request
from launcher.observe.sinks.publish import publish_until_end
from launcher.observe.sinks.sink import EventSummary, PublishRequest, UnusableSink
from launcher.observe.sinks.webhook import EventPoster
from launcher.runtime.recipe.load import load
from launcher.runtime.run.log import RunLog, record_operator_event
from tests.support.runs.listeners import SECRET, WAIT_S, serving_webhook


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "run")


def journal(attempt: Attempt) -> RunLog:
    return RunLog(attempt.store, attempt.number, 1000.0)


def request(store: Store, monkeypatch: pytest.MonkeyPatch, url: str) -> PublishRequest:
    monkeypatch.setenv("MASKFLEET_HOOK", url)
    recipe = load("quickstart", ("events.webhook_env=MASKFLEET_HOOK", "logging.tensorboard=false"))
    return make_publish_request(store, recipe, 0.02)


def post(store: Store, monkeypatch: pytest.MonkeyPatch, url: str, *kinds: str, timeout_s: float = 5.0) -> list[str]:
    """The notes about events of these kinds, posted as the process does."""
    notes: list[str] = []
    poster = EventPoster(request(store, monkeypatch, url), str, notes.append, timeout_s=timeout_s, max_wait_s=0.01)
    poster.publish_events(EventSummary([{"kind": kind, "time": 9e9, "attempt": 0} for kind in kinds]))
    return notes


def test_everything_that_matters_is_posted_whoever_writes_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of ranks, of their successors, and of operators; not those from before, nor routine."""
    record_operator_event(store, "recipe_changed", 1.0)
    before = journal(claim(store))
    before.event("start", 1.0)
    assert before.flush(WAIT_S)
    notes: list[str] = []
    with serving_webhook() as server:
        process = SinkProcess(request(store, monkeypatch, server.url), notes.append)
        first = journal(claim(store))
        first.event("resume", 2.0, step=7)
        first.event("commit", 3.0, step=9)
        assert server.wait(1) == ["resume"]
        first.event("skipped_step", 4.0, step=11)
        assert first.flush(WAIT_S)
        journal(claim(store)).event("damaged_checkpoint", 5.0, what="step 9")
        server.wait(3)
        record_operator_event(store, "end", time.time(), step=20)  # as the command does, just before it ends
        process.request_end()
        process.end_process(WAIT_S)
        assert [body["kind"] for body in server.bodies] == [
            "resume",
            "skipped_step",
            "damaged_checkpoint",
            "end",
        ]
        about = {"run": store.uri, "name": "quickstart"}
        assert server.bodies[0] == {**about, "time": 2.0, "kind": "resume", "attempt": 2, "step": 7}
    assert notes == []


def test_a_server_that_fails_for_a_moment_gets_it_all_the_same(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_webhook(503, 429, 200) as server:
        assert post(store, monkeypatch, server.url, "stop") == []
        assert server.wait(3) == ["stop", "stop", "stop"]


@pytest.mark.parametrize("code", [404, 301, 307])
def test_a_refusal_or_a_redirect_is_asked_once_for_each_event(
    store: Store, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The event and the secret go nowhere but where the operator said; and a GET elsewhere is no delivery."""
    with serving_webhook() as elsewhere, serving_webhook(code, location=elsewhere.url) as server:
        notes = post(store, monkeypatch, server.url, "stop", "end")
        assert server.wait(2) == ["stop", "end"]
        assert elsewhere.requests == 0
    assert [str(code) in note for note in notes] == [True, True]
    assert SECRET not in "".join(notes)
    assert elsewhere.url not in "".join(notes)


def test_the_operator_reads_of_a_webhook_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    with serving_webhook(404) as server:
        process = SinkProcess(request(store, monkeypatch, server.url), notes.append)
        for kind in ("stop", "end"):
            record_operator_event(store, kind, time.time())
        assert server.wait(2) == ["stop", "end"]
        process.request_end()
        process.end_process(WAIT_S)
    (note,) = notes
    assert note.startswith("webhook: ")
    assert "404" in note


def test_a_server_that_is_down_or_hangs_costs_four_tries(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving_webhook(hangs=True) as server:
        hanging = post(store, monkeypatch, server.url, "stop", "end", timeout_s=0.1)
        assert server.wait(8) == ["stop"] * 4 + ["end"] * 4
    down = post(store, monkeypatch, server.url, "stop")
    assert (len(hanging), len(down)) == (2, 1)
    assert "reached" in down[0]
    assert SECRET not in "".join(hanging + down)


def test_the_command_does_not_wait_long_for_it_at_its_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    with serving_webhook(hangs=True) as server:
        process = SinkProcess(request(store, monkeypatch, server.url), notes.append)
        record_operator_event(store, "stop", time.time())
        server.wait(1)
        before = time.monotonic()
        process.request_end()
        process.end_process(0.2)
        assert time.monotonic() - before < WAIT_S
    assert "long" in notes[0]


@pytest.fixture
def malformed(store: Store, monkeypatch: pytest.MonkeyPatch) -> PublishRequest:
    return request(store, monkeypatch, "set by each example")


SECRETS = st.sampled_from(
    ["hunter2secret", "user:hunter2secret@", ":hunter2secret", "[hunter2secret", "%hunter2secret%"]
)
PARTS = st.sampled_from(["http://", "https://", "//", "127.0.0.1:9", "::1", "%zz", "..", "99999"]) | st.sampled_from(
    "@:/?#[] \\\t\n\x00é"
)


@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.lists(PARTS, max_size=4), secret=SECRETS, after=st.lists(PARTS | SECRETS, max_size=4))
def test_no_message_shows_any_part_of_an_address(
    malformed: PublishRequest,
    monkeypatch: pytest.MonkeyPatch,
    before: list[str],
    secret: str,
    after: list[str],
) -> None:
    """However malformed: not usable, or not delivered; never another error, never with the secret."""

    def unknown(host: object, *_: object, **__: object) -> None:
        raise socket.gaierror(-2, f"no such host: {host!r}")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # no test asks a name server for such names
    url = "http" * (not before) + "".join(before) + secret + "".join(after)
    if "\x00" in url:  # no environment can hold it
        return
    monkeypatch.setenv("MASKFLEET_HOOK", url)
    notes: list[str] = []
    try:
        poster = EventPoster(malformed, str, notes.append, max_wait_s=0.0)
        poster.publish_events(EventSummary([{"kind": "stop", "time": 9e9, "attempt": 0}]))
    except UnusableSink as error:
        notes = [_whole(error)]
    assert len(notes) == 1
    assert "hunter2secret" not in notes[0]


def _whole(error: BaseException) -> str:
    """What a traceback would print of it."""
    return "".join(traceback.format_exception_only(error)) + repr(error.__cause__)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "file:///etc/passwd",
        "hooks.example.com",
        "https://a b",
        "https://é",
        "https://me:hunter2secret@hooks.example.com/x",
    ],
)
def test_without_a_valid_address_the_sink_ends_and_says_so(
    store: Store, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    wanted = request(store, monkeypatch, value or "")
    if value is None:
        monkeypatch.delenv("MASKFLEET_HOOK")
    notes: list[str] = []
    publish_until_end("webhook", wanted, threading.Event(), notes.append)
    (note,) = notes
    assert "MASKFLEET_HOOK" in note
    assert not value or value not in note
    assert "hunter2secret" not in note


def test_the_recipe_names_the_variable_and_never_holds_the_address(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = request(store, monkeypatch, f"https://hooks.example.com/{SECRET}")
    assert wanted.sinks == ("webhook",)
    assert SECRET not in wanted.model_dump_json()
    assert "webhook" not in make_publish_request(store, load("quickstart")).sinks
    with pytest.raises(RecipeError, match="webhook_env"):
        load("quickstart", ("events.webhook_env=https://hooks.example.com/x",))
