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
from launcher.observe.trackers.webhook import (
    Announcer,
    NotDelivered,
    Refused,
    Webhook,
    address_of,
    announcing,
)
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.operation import Events
from launcher.runtime.run.log import RunLog, operator_event
from tests.support.runs.listeners import SECRET, WAIT_S, serving_webhook

ABOUT = {"run": "s3://bucket/run", "name": "run"}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "run")


def journal(attempt: Attempt) -> RunLog:
    return RunLog(attempt.store, attempt.number, 1000.0)


def announcer(store: Store, webhook: Webhook, notes: list[str]) -> Announcer:
    return Announcer(store, webhook, ABOUT, notes.append, poll_s=0.02, last_words_s=WAIT_S)


def test_everything_that_matters_is_posted_whoever_writes_it(store: Store) -> None:
    """Events of ranks, of their successors, and of operators; not those from before, nor routine."""
    operator_event(store, "recipe_changed", 1.0)
    before = journal(claim(store))
    before.event("start", 1.0)
    assert before.flush(WAIT_S)
    notes: list[str] = []
    with serving_webhook() as server:
        with announcer(store, Webhook(server.url), notes):
            first = journal(claim(store))
            first.event("resume", 2.0, step=7)
            first.event("commit", 3.0, step=9)
            assert server.wait(1) == ["resume"]
            first.event("skipped_step", 4.0, step=11)
            assert first.flush(WAIT_S)
            journal(claim(store)).event("damaged_checkpoint", 5.0, what="step 9")
            server.wait(3)
            operator_event(store, "end", 6.0, step=20)  # as the command does, just before it ends
        assert [body["kind"] for body in server.bodies] == [
            "resume",
            "skipped_step",
            "damaged_checkpoint",
            "end",
        ]
        assert server.bodies[0] == {**ABOUT, "time": 2.0, "kind": "resume", "attempt": 2, "step": 7}
    assert notes == []


def test_a_server_that_fails_for_a_moment_gets_it_all_the_same(store: Store) -> None:
    notes: list[str] = []
    with serving_webhook(503, 429, 200) as server:
        webhook = Webhook(server.url, longest_wait_s=0.01)
        with announcer(store, webhook, notes):
            operator_event(store, "stop", 1.0)
            assert server.wait(3) == ["stop", "stop", "stop"]
    assert notes == []


def test_a_server_that_refuses_is_not_asked_again(store: Store) -> None:
    """And is mentioned once, however many events it refuses, never with its address."""
    notes: list[str] = []
    with serving_webhook(404) as server, announcer(store, Webhook(server.url), notes):
        operator_event(store, "stop", 1.0)
        operator_event(store, "end", 2.0)
        assert server.wait(2) == ["stop", "end"]
    (note,) = notes
    assert "404" in note
    assert SECRET not in note


def test_a_server_that_is_down_costs_nothing(store: Store) -> None:
    with serving_webhook() as server:
        url = server.url
    notes: list[str] = []
    with announcer(store, Webhook(url, longest_wait_s=0.01), notes):
        operator_event(store, "stop", 1.0)
    (note,) = notes
    assert "reached" in note
    assert SECRET not in note


def test_a_server_that_hangs_costs_its_patience(store: Store) -> None:
    notes: list[str] = []
    with serving_webhook(hangs=True) as server:
        with announcer(store, Webhook(server.url, timeout_s=0.1, longest_wait_s=0.01), notes):
            operator_event(store, "stop", 1.0)
            operator_event(store, "end", 2.0)
        assert server.wait(8) == ["stop"] * 4 + ["end"] * 4
    assert len(notes) == 1
    assert SECRET not in notes[0]


def test_the_command_does_not_wait_long_for_it_at_its_end(store: Store) -> None:
    with serving_webhook(hangs=True) as server:
        patient = Webhook(server.url, timeout_s=600.0)
        before = time.monotonic()
        with Announcer(store, patient, ABOUT, print, poll_s=0.02, last_words_s=0.2):
            operator_event(store, "stop", 1.0)
            server.wait(1)
        assert time.monotonic() - before < WAIT_S


def test_waiting_between_tries_ends_with_the_command() -> None:
    given_up = threading.Event()
    given_up.set()
    with serving_webhook(500) as server:
        with pytest.raises(NotDelivered, match="500"):
            Webhook(server.url).post({"kind": "stop"}, given_up)
        assert len(server.bodies) == 1


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_redirect_is_a_refusal(store: Store, code: int) -> None:
    """The event and the secret go nowhere but where the operator said; and a GET elsewhere is no delivery."""
    notes: list[str] = []
    with serving_webhook() as elsewhere, serving_webhook(code, location=elsewhere.url) as server:
        with announcer(store, Webhook(server.url), notes):
            operator_event(store, "stop", 1.0)
            operator_event(store, "end", 2.0)
            assert server.wait(2) == ["stop", "end"]
        assert elsewhere.requests == 0
    (note,) = notes
    assert f"{code}, " in note
    assert SECRET not in note
    assert elsewhere.url not in note


SECRETS = st.sampled_from(
    ["hunter2secret", "user:hunter2secret@", ":hunter2secret", "[hunter2secret", "%hunter2secret%"]
)
PARTS = st.sampled_from(
    ["http://", "https://", "//", "127.0.0.1:9", "::1", "%zz", "..", "99999"]
) | st.sampled_from("@:/?#[] \\\t\n\x00é")


@pytest.mark.long
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(before=st.lists(PARTS, max_size=4), secret=SECRETS, after=st.lists(PARTS | SECRETS, max_size=4))
def test_no_message_shows_any_part_of_an_address(
    store: Store, monkeypatch: pytest.MonkeyPatch, before: list[str], secret: str, after: list[str]
) -> None:
    """However malformed: refused at once, or not delivered; never another error, never with the secret."""

    def unknown(host: object, *_: object, **__: object) -> None:
        raise socket.gaierror(-2, f"no such host: {host!r}")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)  # no test asks a name server for such names
    url = "http" * (not before) + "".join(before) + secret + "".join(after)
    with monkeypatch.context() as patch:
        if "\x00" not in url:  # no environment can hold it
            patch.setenv("MASKFLEET_HOOK", url)
        notes: list[str] = []
        with announcing(store, Events(webhook_env="MASKFLEET_HOOK"), ABOUT, notes.append):
            pass
        assert "hunter2secret" not in "".join(notes)
    given_up = threading.Event()
    given_up.set()
    with pytest.raises((NotDelivered, Refused)) as raised:
        Webhook(url).post({"kind": "stop"}, given_up)
    assert "hunter2secret" not in _whole(raised.value)


def _whole(error: BaseException) -> str:
    """What a traceback would print of it."""
    return "".join(traceback.format_exception_only(error)) + repr(error.__cause__)


def test_an_address_with_a_password_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASKFLEET_HOOK", "https://me:hunter2secret@hooks.example.com/x")
    with pytest.raises(Refused, match=r"\bpassword\b") as refused:
        address_of(Events(webhook_env="MASKFLEET_HOOK"))
    assert "hunter2secret" not in str(refused.value)
    assert "example" not in str(refused.value)


@pytest.mark.parametrize(
    "value", [None, "", "file:///etc/passwd", "hooks.example.com", "https://a b", "https://é"]
)
def test_without_an_address_the_run_goes_on_and_says_so(
    store: Store, monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    if value is None:
        monkeypatch.delenv("MASKFLEET_HOOK", raising=False)
    else:
        monkeypatch.setenv("MASKFLEET_HOOK", value)
    notes: list[str] = []
    events = Events(webhook_env="MASKFLEET_HOOK")
    with pytest.raises(Refused):
        address_of(events)
    with announcing(store, events, ABOUT, notes.append):
        pass
    (note,) = notes
    assert "MASKFLEET_HOOK" in note
    assert not value or value not in note


@pytest.mark.long
def test_the_recipe_names_the_variable_and_never_holds_the_address(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = load("quickstart", ("events.webhook_env=MASKFLEET_HOOK",))
    monkeypatch.setenv("MASKFLEET_HOOK", f"https://hooks.example.com/{SECRET}")
    webhook = address_of(recipe.events)
    assert webhook is not None
    assert webhook.url.endswith(SECRET)
    assert SECRET not in recipe.to_yaml()
    assert address_of(load("quickstart").events) is None
    with pytest.raises(RecipeError, match="webhook_env"):
        load("quickstart", ("events.webhook_env=https://hooks.example.com/x",))
