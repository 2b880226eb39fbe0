"""How long a failing store is tried again, what is said meanwhile, and how many requests were repeated.

An operation is tried again until it has made no progress for the store's patience. Progress renews patience, so a long
upload is not given up because it is long. Repeating the same work is no progress: an operation that never gets beyond
the same point ends.

An outage that lasts is announced by one log record of level WARNING, and its end by another. The command line prints
them as they are.
"""

import logging
import math
import os
import threading
import time
from functools import cache
from random import SystemRandom

from data_service.printable import one_line, without_secrets
from data_service.store.errors import CredentialsMissing, StoreError

VARIABLE = "MASKFLEET_STORE_PATIENCE_S"
_DEFAULT_S = 120.0
_FEWEST_ATTEMPTS = 3  # however long one took: a process may have been stopped meanwhile
_FIRST_CREDENTIALS_S = 20.0  # for a process that never had any: most likely there are none
_LONGEST_PAUSE_S = 15.0
_JITTER = SystemRandom()  # its draws differ between processes that were forked, and disturb no seeded ones
_log = logging.getLogger(__name__)
QUIET_S = 5.0  # what passes sooner needs no words
_lock = threading.Lock()
_total = 0


def default_patience_s() -> float:
    """Seconds: what the environment variable MASKFLEET_STORE_PATIENCE_S says, else 120.

    Raises:
        StoreError: the variable holds no positive number.
    """
    text = os.environ.get(VARIABLE)
    try:
        seconds = _DEFAULT_S if text is None else float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise StoreError(
            f"{VARIABLE}={text!r} is not a number of seconds above 0", remedy=f"correct or unset {VARIABLE}"
        )
    return seconds


class Patience:
    """The patience with one operation: `seconds` without progress, and at least 3 attempts.

    `since`: when it last made progress, or began, by `time.monotonic`.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.since = time.monotonic()
        self._failures = 0
        self._most = 0

    def reached(self, amount: int) -> None:
        """The operation got as far as `amount`, in any unit. Only more than ever before is progress."""
        if amount > self._most:
            self._most, self.since, self._failures = amount, time.monotonic(), 0

    def limit(self, error: StoreError) -> float:
        """Seconds without progress after which this failure is the last."""
        return (
            min(self.seconds, _FIRST_CREDENTIALS_S) if isinstance(error, CredentialsMissing) else self.seconds
        )

    def pause(self, error: StoreError) -> float | None:
        """Seconds to wait after this failure, drawn at random so that many do not come back together.

        None if patience is used up.
        """
        self._failures += 1
        limit = self.limit(error)
        if self._failures >= _FEWEST_ATTEMPTS and time.monotonic() - self.since >= limit:
            return None
        longest = min(_LONGEST_PAUSE_S, limit / 4)
        return _JITTER.uniform(0, min(longest, 0.2 * 2 ** min(self._failures, 10)))


_log.addHandler(logging.NullHandler())  # without a listener nothing is printed


class Outage:
    """The present outage of one store, if any, as all threads of this process see it."""

    def __init__(self, uri: str) -> None:
        self._uri = without_secrets(uri)
        self._lock = threading.Lock()
        self._began: float | None = None
        self._said = False

    def failed(self, error: StoreError, *, began: float, pause: float, patience_s: float) -> None:
        """An attempt failed, after nothing was heard since `began` (of `time.monotonic`). The next comes in
        `pause` s.
        """
        with self._lock:
            self._began = began if self._began is None else self._began
            if self._said or time.monotonic() + pause - self._began < QUIET_S:
                return
            self._said = True
        reason = one_line(error.problem)
        _log.warning("%s; trying again, for at most %.0f s without progress", reason, patience_s)

    def answered(self) -> None:
        """The store answered, even if it refused."""
        with self._lock:
            began, said = self._began, self._said
            self._began, self._said = None, False
        if said and began is not None:
            _log.warning("%s answers again, after %.0f s", self._uri, time.monotonic() - began)


@cache
def outage_of(uri: str) -> Outage:
    """This process's outage of the store at `uri`."""
    return Outage(uri)


def count_retry() -> None:
    """Count a request that failed in a way that may pass, and is made again."""
    global _total
    with _lock:
        _total += 1


def total_retries() -> int:
    """Requests that were made again since the process began."""
    return _total
