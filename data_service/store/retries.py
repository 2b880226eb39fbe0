"""Retries of a failing store: how long an operation is retried, what is logged meanwhile, and a count of the retries.

An operation is retried until it has made no progress for the store's patience (in seconds). Progress renews the
patience, so a long upload is not given up while it advances. Repeated work is not progress: an operation that never
gets beyond the same point is given up.

One log record of level WARNING announces a lasting outage, and another one its end. The command line prints both
unchanged.
"""

import logging
import math
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from random import SystemRandom
from typing import TypeVar

from data_service.printable import mask_secrets, one_line
from data_service.store.errors import TRANSIENT_ERRORS, CredentialsMissing, StoreError

_T = TypeVar("_T")
PATIENCE_VARIABLE = "MASKFLEET_STORE_PATIENCE_S"
_DEFAULT_PATIENCE_S = 120.0
_MIN_ATTEMPTS = 3  # least number of attempts: the process may have been suspended during the first
_UNACCEPTED_CREDENTIALS_PATIENCE_S = 20.0  # patience in seconds before any credentials were accepted: there may be none
_MAX_PAUSE_S = 15.0  # longest pause between two attempts, in seconds
# Pauses from the system's random source differ between forked processes and leave seeded generators unchanged.
_JITTER_RANDOM = SystemRandom()
_log = logging.getLogger(__name__)
ANNOUNCED_OUTAGE_S = 5.0  # seconds without an answer after which the outage is logged
_lock = threading.Lock()  # guards the following number
_retry_count = 0  # retries of requests by this process so far


def default_patience_s() -> float:
    """Return the patience in seconds from the environment variable MASKFLEET_STORE_PATIENCE_S, else 120.

    Raises:
        StoreError: the variable does not hold a positive number.
    """
    text = os.environ.get(PATIENCE_VARIABLE)
    try:
        seconds = _DEFAULT_PATIENCE_S if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise StoreError(
            f"{PATIENCE_VARIABLE}={text!r} is not a number of seconds above 0",
            remedy=f"correct or unset {PATIENCE_VARIABLE}",
        )
    return seconds


class RetryLimit:
    """The retry limit of one operation: it is given up after `seconds` without progress, but not before its third
    attempt. `since`: time of the operation's last progress, or of its start, by `time.monotonic`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.since = time.monotonic()
        self._failures = 0
        self._most = 0

    def record_progress(self, amount: int) -> bool:
        """Record how far the operation got, in any unit. Return whether `amount` is a new maximum: progress."""
        if amount <= self._most:
            return False
        self._most, self.since, self._failures = amount, time.monotonic(), 0
        return True

    def limit_s(self, error: StoreError) -> float:
        """Return the seconds without progress after which a failure of this kind is final."""
        return (
            min(self.seconds, _UNACCEPTED_CREDENTIALS_PATIENCE_S)
            if isinstance(error, CredentialsMissing)
            else self.seconds
        )

    def next_pause_s(self, error: StoreError) -> float | None:
        """Return the seconds to wait after this failure; None if the patience is used up.

        The pause is random, so that many clients do not retry at the same moment.
        """
        self._failures += 1
        limit = self.limit_s(error)
        if self._failures >= _MIN_ATTEMPTS and time.monotonic() - self.since >= limit:
            return None
        longest = min(_MAX_PAUSE_S, limit / 4)
        return _JITTER_RANDOM.uniform(0, min(longest, 0.2 * 2 ** min(self._failures, 10)))


_log.addHandler(logging.NullHandler())  # without a handler Python would print warnings by itself


class Outage:
    """The current outage of one store, if any, shared by all threads of this process."""

    def __init__(self, uri: str) -> None:
        self._uri = mask_secrets(uri)
        self._lock = threading.Lock()
        self._began: float | None = None
        self._announced = False

    def record_failure(self, error: StoreError, *, began: float, pause: float, patience_s: float) -> None:
        """Record a failed attempt; announce a lasting outage once.

        Args:
            error: failure of the attempt.
            began: time of the last answer or progress before the failure, by `time.monotonic`.
            pause: seconds until the next attempt.
            patience_s: seconds without progress after which the operation is given up.
        """
        with self._lock:
            self._began = began if self._began is None else self._began
            if self._announced or time.monotonic() + pause - self._began < ANNOUNCED_OUTAGE_S:
                return
            self._announced = True
        reason = one_line(error.problem)
        _log.warning("%s; trying again, for at most %.0f s without progress", reason, patience_s)

    def record_answer(self) -> None:
        """Record that the store answered, even if it refused. Log the end of an outage that was announced."""
        with self._lock:
            began, announced = self._began, self._announced
            self._began, self._announced = None, False
        if announced and began is not None:
            _log.warning("%s answers again, after %.0f s", self._uri, time.monotonic() - began)


@cache
def get_outage(uri: str) -> Outage:
    """Return the `Outage` of the store at `uri`, one object in this process."""
    return Outage(uri)


def call_with_retries(operation: Callable[[], _T], patience: RetryLimit, outage: Outage) -> _T:
    """Return the operation's result. Retry it after transient failures until the patience is used up.

    Raises StoreError: the last transient failure, or the first other one, which also counts as an answer of the store.
    """
    while True:
        began = time.monotonic()
        try:
            result = operation()
        except TRANSIENT_ERRORS as error:
            pause = patience.next_pause_s(error)
            if pause is None:
                raise
            silent = max(began, patience.since)
            outage.record_failure(error, began=silent, pause=pause, patience_s=patience.limit_s(error))
            _log.debug("%s; again in %.1f s", error.problem, pause)
            count_retry()
            time.sleep(pause)
        except StoreError:
            outage.record_answer()
            raise
        else:
            outage.record_answer()
            return result


def count_retry() -> None:
    """Count one retry of a request after a transient error."""
    global _retry_count
    with _lock:
        _retry_count += 1


def total_retries() -> int:
    """Return the number of retries of requests since the process began."""
    return _retry_count
