"""What is said while a store does not answer: one sentence when that has lasted, one when it is over.

Both are log records of level WARNING, one line each, which the command line prints as they are.
"""

import logging
import threading
import time
from functools import cache

from data_service.store.errors import StoreError
from data_service.visible import one_line

_log = logging.getLogger(__name__)
_log.addHandler(logging.NullHandler())  # without a listener nothing is printed

QUIET_S = 5.0  # what passes sooner needs no words


class Outage:
    """The present outage of one store, if any, as all threads of this process see it."""

    def __init__(self, uri: str) -> None:
        self._uri = uri
        self._lock = threading.Lock()
        self._began: float | None = None
        self._said = False

    def failed(self, error: StoreError, *, began: float, pause: float, patience_s: float) -> None:
        """An attempt that began at `began` (of `time.monotonic`) failed; the next comes in `pause` seconds."""
        with self._lock:
            self._began = began if self._began is None else self._began
            if self._said or time.monotonic() + pause - self._began < QUIET_S:
                return
            self._said = True
        reason = one_line(error.problem)
        _log.warning("%s; trying again, for at most %.0f s without progress", reason, patience_s)

    def answered(self) -> None:
        """The store answered, be it a refusal."""
        with self._lock:
            began, said = self._began, self._said
            self._began, self._said = None, False
        if said and began is not None:
            _log.warning("%s answers again, after %.0f s", self._uri, time.monotonic() - began)


@cache
def outage_of(uri: str) -> Outage:
    """The one of this process for the store at `uri`."""
    return Outage(uri)
