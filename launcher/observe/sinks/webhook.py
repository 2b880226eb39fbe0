"""Posts a run's events to a web server as they happen: a chat, a pager, a dashboard.

The delivery of an event is tried a few times; then the next event follows. The URL may hold a secret, so the recipe
names only the environment variable with the URL, and no message shows the URL.
"""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from http.client import HTTPException
from urllib.parse import urlsplit

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from launcher.observe.sinks.sink import EventSummary, PublishRequest, Sink, UnusableSink
from launcher.runtime.run.step_table import Record

_ANSWER_TIMEOUT_S = 5.0  # longest wait for the server's answer
_MAX_TRIES = 4  # largest number of attempts to deliver one event
_MAX_WAIT_S = 8.0  # longest wait between two tries
_TRANSIENT_STATUS_CODES = frozenset({408, 425, 429})  # client errors (4xx) after which another try may succeed


class NotDelivered(ConnectionError):
    """The server did not take an event, but another try may succeed."""


class EventRefused(ConnectionError):
    """The server does not take an event, and another try would not help."""


class EventPoster(Sink):
    """Posts the events of this start of a run as JSON, to the URL that an environment variable holds.

    Args:
        timeout_s, max_wait_s: longest wait for an answer, and between two tries.
    """

    takes_figures = False

    def __init__(
        self,
        request: PublishRequest,
        identify: Callable[[], str],
        note: Callable[[str], None],
        *,
        timeout_s: float = _ANSWER_TIMEOUT_S,
        max_wait_s: float = _MAX_WAIT_S,
    ) -> None:
        self._request, self._note, self._timeout_s = request, note, timeout_s
        self._url = _webhook_url(request.webhook_env or "")
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._tries = Retrying(
            stop=stop_after_attempt(_MAX_TRIES),
            wait=wait_random_exponential(multiplier=0.5, max=max_wait_s),
            retry=retry_if_exception_type(NotDelivered),
            reraise=True,
        )

    def publish_events(self, summary: EventSummary) -> None:
        for event in summary.new:
            if event["attempt"] > self._request.attempts or event["time"] >= self._request.began:
                try:
                    self._tries(self._post_event, event)
                except (NotDelivered, EventRefused) as error:
                    self._note(f"an event was not delivered: {error}")

    def _post_event(self, event: Record) -> None:
        """Deliver one event. Raises NotDelivered, EventRefused."""
        about = {"run": self._request.uri, "name": self._request.name}
        headers = {"Content-Type": "application/json", "User-Agent": "maskfleet"}
        try:
            post = urllib.request.Request(self._url, json.dumps(about | event).encode(), headers)
            with self._opener.open(post, timeout=self._timeout_s):
                return
        # Our own words, and no chained exception: the message of a library or a server may repeat the URL.
        except urllib.error.HTTPError as error:
            raise _error_for_status(error.code) from None
        except urllib.error.URLError as error:
            raise NotDelivered(f"the webhook cannot be reached: {_error_kind(error.reason)}") from None
        except (OSError, HTTPException) as error:
            raise NotDelivered(f"the webhook does not answer: {_error_kind(error)}") from None
        except ValueError:
            raise EventRefused("the webhook's address is malformed") from None


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Does not follow redirects. Otherwise the secret and the event would be sent to any address that a redirect names,
    and a POST would arrive as a GET."""

    def redirect_request(self, *_: object) -> None:
        return None


def _error_for_status(code: int) -> NotDelivered | EventRefused:
    if 300 <= code < 400:
        return EventRefused(f"the webhook answered {code}, a redirect, which is not followed: set the final URL")
    may_pass = code >= 500 or code in _TRANSIENT_STATUS_CODES
    return (NotDelivered if may_pass else EventRefused)(f"the webhook answered {code}")


def _error_kind(reason: object) -> str:
    """Return the kind of a failure in words, without its message, which may repeat the URL."""
    number = reason.errno if isinstance(reason, OSError) else None
    return os.strerror(number) if number is not None and number > 0 else type(reason).__name__


def _webhook_url(variable: str) -> str:
    """Return the URL in an environment variable. Raises UnusableSink, whose message shows no part of the URL, if it is
    not valid."""
    url = os.environ.get(variable, "")
    if not url:
        raise UnusableSink(f"the environment variable {variable} is not set")
    invalid = f"the value of the environment variable {variable} is not an http(s) URL"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise UnusableSink(invalid) from None
    printable = url.isascii() and url.isprintable() and " " not in url
    if not printable or parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        raise UnusableSink(invalid)
    if "@" in parts.netloc:
        raise UnusableSink(f"{variable} holds a user name or a password: a secret belongs in the URL's path")
    return url
