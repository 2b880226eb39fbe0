"""Posts a run's events to a web server as they happen: a chat, a pager, a dashboard.

A thread of the driver follows the run's events in its store, whichever process writes them, and posts those that a
person would want to know. A slow or unreachable server does not delay training: the thread tries each event a few times
and continues with the next. The URL may hold a secret, so the recipe names only the environment variable that holds it,
and no message shows it.
"""

import json
import os
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from tenacity import (
    Retrying,
    retry_if_exception_type,
    stop_after_attempt,
    stop_when_event_set,
    wait_random_exponential,
)
from tenacity.nap import sleep_using_event

from data_service.store.base import Store
from data_service.store.errors import StoreError
from launcher.errors import RunError
from launcher.runtime.recipe.operation import Events
from launcher.runtime.run.following import EventFollower

_POLL_S = 5.0
_TIMEOUT_S = 5.0  # longest wait for the server's answer
_TRIES = 4  # largest number of tries of one event
_LONGEST_WAIT_S = 8.0  # between two tries
_LAST_WORDS_S = 10.0  # for posting the remaining events when the command ends
ROUTINE = frozenset({"commit", "evaluated", "evaluation_skipped", "preflight", "underway"})
"""The kinds of events that are not posted, because nobody wants to be told of them."""
_TRANSIENT = frozenset({408, 425, 429})  # client errors (4xx) after which another try may succeed


def address_of(events: Events) -> "Webhook | None":
    """Return the webhook that the recipe names; None if it names none. Raises Refused if its URL is missing or not
    valid."""
    if events.webhook_env is None:
        return None
    url = os.environ.get(events.webhook_env, "")
    if not url:
        raise Refused(f"the environment variable {events.webhook_env} is not set")
    reason = _why_no_address(url)
    if reason is not None:
        raise Refused(f"the value of the environment variable {events.webhook_env} {reason}")
    return Webhook(url)


def _why_no_address(url: str) -> str | None:
    """Return what is wrong with `url`, without repeating any part of it; None if it is valid."""
    nothing = "is not an http(s) URL"
    if not (url.isascii() and url.isprintable()) or " " in url:
        return nothing
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return nothing
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return nothing
    if "@" in parts.netloc:
        return "has a user name or a password in it, which is not supported: a secret belongs in its path"
    return None


class NotDelivered(ConnectionError):
    """The server did not take an event, but another try may succeed."""


class Refused(ConnectionError):
    """The server does not take an event, and another try would not help."""


@dataclass(frozen=True)
class Webhook:
    """A URL that takes events by POST, as JSON.

    Attributes:
        timeout_s: longest wait for an answer, in seconds.
        longest_wait_s: longest wait between two tries, in seconds.
    """

    url: str
    timeout_s: float = _TIMEOUT_S
    longest_wait_s: float = _LONGEST_WAIT_S

    def post(self, event: dict[str, Any], given_up: threading.Event) -> None:
        """Deliver one event, in a few tries, until `given_up`.

        Raises NotDelivered, Refused: the event was not delivered. The message has the last answer, without the URL.
        """
        data = json.dumps(event).encode()
        tries = Retrying(
            stop=stop_after_attempt(_TRIES) | stop_when_event_set(given_up),
            wait=wait_random_exponential(multiplier=0.5, max=self.longest_wait_s),
            retry=retry_if_exception_type(NotDelivered),
            sleep=sleep_using_event(given_up),
            reraise=True,
        )
        tries(self._post, data)

    def _post(self, data: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "maskfleet"}
        try:
            request = urllib.request.Request(self.url, data, headers)
            with urllib.request.build_opener(_NoRedirect).open(request, timeout=self.timeout_s):
                return
        # Our own words, and no chained exception: the message of a library or a server may repeat the URL.
        except urllib.error.HTTPError as error:
            raise _answered(error.code) from None
        except urllib.error.URLError as error:
            raise NotDelivered(f"it cannot be reached: {_spoken(error.reason)}") from None
        except (OSError, HTTPException) as error:
            raise NotDelivered(f"it does not answer: {_spoken(error)}") from None
        except ValueError:
            raise Refused("its address is malformed") from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Does not follow redirects. Otherwise the secret and the event would be sent to any address that a redirect names,
    and a POST would arrive as a GET."""

    def redirect_request(self, *_: object) -> None:
        return None


def _answered(code: int) -> NotDelivered | Refused:
    if 300 <= code < 400:
        return Refused(f"it answered {code}, a redirect, which is not followed: name the final address")
    later = code >= 500 or code in _TRANSIENT
    return (NotDelivered if later else Refused)(f"it answered {code}")


def _spoken(reason: object) -> str:
    """Return the kind of a failure in words."""
    match reason:
        case TimeoutError():
            return "no answer in time"
        case socket.gaierror():
            return "its name is not known"
        case ssl.SSLError():
            return "no trusted TLS connection"
        case OSError(errno=int(number)):
            return os.strerror(number)
    return type(reason).__name__


class Announcer:
    """Posts a run's events from a thread, inside a `with` block. The end of the block waits a little for the last ones.

    Args:
        about: fields that are added to every event, about the run.
        note: function that shows a line to the operator.
    """

    def __init__(
        self,
        store: Store,
        webhook: Webhook,
        about: dict[str, str],
        note: Callable[[str], None],
        *,
        poll_s: float = _POLL_S,
        last_words_s: float = _LAST_WORDS_S,
    ) -> None:
        self._follower, self._webhook, self._about, self._note = EventFollower(store), webhook, about, note
        self._poll_s, self._last_words_s = poll_s, last_words_s
        self._ending, self._given_up = threading.Event(), threading.Event()
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="webhook", daemon=True)

    def __enter__(self) -> "Announcer":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ending.set()
        self._thread.join(self._last_words_s)
        self._given_up.set()

    def _run(self) -> None:
        ended = False
        while not ended:
            ended = self._ending.wait(self._poll_s)  # events recorded until then are still posted
            try:
                for event in self._follower.new():
                    if event["kind"] not in ROUTINE:
                        self._post(event)
            except (StoreError, RunError) as error:
                self._complain(error.problem)

    def _post(self, event: dict[str, Any]) -> None:
        if self._given_up.is_set():
            return
        try:
            self._webhook.post(self._about | event, self._given_up)
        except (NotDelivered, Refused) as error:
            self._complain(str(error))

    def _complain(self, reason: str) -> None:
        """Tell the operator about a failure, but only about the first one."""
        if not self._complained:
            self._complained = True
            self._note(
                f"webhook: an event was not delivered: {reason}; training continues, further events are tried"
            )


def announcing(
    store: Store, events: Events, about: dict[str, str], note: Callable[[str], None]
) -> AbstractContextManager[object]:
    """Post the events of the run in `store` until the context ends, if the recipe names a webhook."""
    try:
        webhook = address_of(events)
    except Refused as error:
        note(f"webhook: no event will be posted: {error}")  # no reason not to train
        return nullcontext()
    return nullcontext() if webhook is None else Announcer(store, webhook, about, note)
