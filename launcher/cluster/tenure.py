"""A command's hold on its run: it claims attempts, shows that the newest lives, notices who has taken the run over.

All of it talks to the store. None of it is in the way of anybody who waits for something else.
"""

import logging
import threading

from checkpoints.attempt import Attempt, Heartbeat, Owner, claim
from checkpoints.errors import CheckpointError
from data_service.store.errors import StoreError

_log = logging.getLogger(__name__)

LOOK_S = 10.0  # between two looks for a successor


class Tenure:
    """The attempts of one command, one after another, each in the driver's name.

    Args:
        first: the attempt that the driver has claimed.
        owner: the driver.
        look_s: seconds between two looks for somebody else's attempt.
    """

    def __init__(self, first: Attempt, owner: Owner, look_s: float = LOOK_S) -> None:
        self._newest, self._owner, self._look_s = first, owner, look_s
        self._unused = True  # no group has had the newest yet
        self._taken, self._closed = threading.Event(), threading.Event()
        self._heart = Heartbeat(first)
        self._heart.__enter__()  # machines may have to be waited for
        threading.Thread(target=self._look, name="successor", daemon=True).start()

    @property
    def taken(self) -> bool:
        """Whether somebody else has claimed a newer attempt."""
        return self._taken.is_set()

    def next(self) -> Attempt:
        """The attempt of the next group of ranks.

        Raises:
            RunIsActive: somebody else has taken the run.
            StoreError: the store does not let us claim; ask again.
        """
        if not self._unused:
            self._advance(claim(self._newest.store, owner=self._owner))
        self._unused = False
        return self._newest

    def close(self, patience_s: float) -> None:
        """Show no more life. A store that hangs is waited for `patience_s` seconds."""
        self._closed.set()
        ending = threading.Thread(target=self._heart.__exit__, name="heartbeat end", daemon=True)
        ending.start()
        ending.join(patience_s)

    def _advance(self, attempt: Attempt) -> None:
        before, self._heart = self._heart, Heartbeat(attempt)
        self._heart.__enter__()
        self._newest = attempt
        before.__exit__()

    def _look(self) -> None:
        """A store that does not answer now will be asked again, and every commit asks, too."""
        while not self._closed.wait(self._look_s):
            try:
                if self._newest.superseded(self._owner) is not None:
                    self._taken.set()
                    return
            except (StoreError, CheckpointError, ValueError) as error:
                _log.warning("cannot tell whether the run was taken over: %s", error)
