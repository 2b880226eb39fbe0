"""How long a failing store is tried again: until an operation has got no further for the store's patience.

Progress renews patience, so a long upload is not given up because it is long. Work that is only done again is no
progress: an operation that never gets beyond the same point ends.
"""

import math
import os
import time
from random import SystemRandom

from data_service.store.errors import CredentialsMissing, StoreError

VARIABLE = "MASKFLEET_STORE_PATIENCE_S"
_DEFAULT_S = 120.0
_FEWEST_ATTEMPTS = 3  # however long one took: a process may have been stopped meanwhile
_FIRST_CREDENTIALS_S = 20.0  # for a process that never had any: most likely there are none
_LONGEST_PAUSE_S = 15.0
_JITTER = SystemRandom()  # its draws differ between processes that were forked, and disturb no seeded ones


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
    """The patience with one operation, from its start on: `seconds` without progress, and at least 3 attempts."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._since = time.monotonic()
        self._failures = 0
        self._most = 0

    def reached(self, amount: int) -> None:
        """The operation got as far as `amount`, in any unit. Only more than ever before is progress."""
        if amount > self._most:
            self._most, self._since, self._failures = amount, time.monotonic(), 0

    def pause(self, error: StoreError) -> float | None:
        """Seconds to wait after this failure, drawn at random so that many do not come back together.

        None if patience is used up.
        """
        self._failures += 1
        limit = self.seconds
        if isinstance(error, CredentialsMissing):
            limit = min(limit, _FIRST_CREDENTIALS_S)
        if self._failures >= _FEWEST_ATTEMPTS and time.monotonic() - self._since >= limit:
            return None
        longest = min(_LONGEST_PAUSE_S, limit / 4)
        return _JITTER.uniform(0, min(longest, 0.2 * 2 ** min(self._failures, 10)))
