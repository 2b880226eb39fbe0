"""A command's claim on its run: it claims attempts (numbered starts, of which only the newest may write), renews the
heartbeat of its newest attempt, and notices a newer claim by another start.

The heartbeat, the search for newer claims, and the claims of later attempts run on separate threads.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

from checkpoints.attempt import Attempt, Heartbeat, Owner, claim
from checkpoints.errors import CheckpointError
from data_service.store.errors import TRANSIENT_ERRORS, StoreError

_log = logging.getLogger(__name__)

SUCCESSOR_CHECK_INTERVAL_S = 10.0  # interval of checks whether another start has claimed the run
_CLAIM_POLL_S = 1.0  # wait before a claim is repeated if the store did not answer
_LAST_HEARTBEAT_TIMEOUT_S = 0.5  # time limit for ending the heartbeat


class RunClaim:
    """Claims the attempts of one command, one after another. As a context manager, it ends its threads at the end.

    Args:
        first: the attempt that was claimed already.
        owner: the driver's identity, which claims show.
    """

    def __init__(self, first: Attempt, owner: Owner) -> None:
        self._newest, self._owner = first, owner
        self._unused = True  # whether no group of ranks has the newest attempt yet
        self._taken, self._closed = threading.Event(), threading.Event()
        self._claims = ThreadPoolExecutor(1, thread_name_prefix="claim")
        self._heart = Heartbeat(first)
        self._heart.__enter__()  # at once, because the first group may wait long for machines
        threading.Thread(target=self._watch_claims, name="successor", daemon=True).start()

    @property
    def is_superseded(self) -> bool:
        """Whether another start has claimed a newer attempt."""
        return self._taken.is_set()

    def __enter__(self) -> "RunClaim":
        return self

    def __exit__(self, *error: object) -> None:
        self.close(_LAST_HEARTBEAT_TIMEOUT_S)

    def claim_with_retries(self, note: Callable[[str], None], poll_s: float) -> Iterator[Attempt | None]:
        """Claim the attempt of the next group of ranks. Yield None every `poll_s` seconds until it is claimed, then
        yield it. While the store does not answer, the claim is repeated; `note` shows that to the operator once.

        Raises RunIsActive if another start has claimed the run.
        """
        waits = False
        while True:
            claimed = self._claims.submit(self.claim_next)
            while not wait([claimed], timeout=poll_s).done:
                yield None
            try:
                yield claimed.result()
                return
            except TRANSIENT_ERRORS as error:
                if not waits:
                    note(f"the ranks wait for the store: {error.problem}")
                waits = True
            yield None
            self._closed.wait(_CLAIM_POLL_S)

    def claim_next(self) -> Attempt:
        """Claim the attempt of the next group of ranks.

        Raises:
            RunIsActive: if another start has claimed the run.
            StoreError: if the store does not answer; call again.
        """
        if not self._unused:
            self._set_newest_attempt(claim(self._newest.store, owner=self._owner))
        self._unused = False
        return self._newest

    def close(self, patience_s: float) -> None:
        """Stop the heartbeat and the other threads. Wait at most `patience_s` seconds if the store does not answer."""
        self._closed.set()
        self._claims.shutdown(wait=False, cancel_futures=True)
        ending = threading.Thread(target=self._heart.__exit__, name="heartbeat end", daemon=True)
        ending.start()
        ending.join(patience_s)

    def _set_newest_attempt(self, attempt: Attempt) -> None:
        before, self._heart = self._heart, Heartbeat(attempt)
        self._heart.__enter__()
        self._newest = attempt
        before.__exit__()

    def _watch_claims(self) -> None:
        """Check for a newer claim until there is one or the command ends. Errors of the store are ignored, because the
        next check and every commit look again."""
        while not self._closed.wait(SUCCESSOR_CHECK_INTERVAL_S):
            try:
                if self._newest.superseding_owner(self._owner) is not None:
                    self._taken.set()
                    return
            except (StoreError, CheckpointError, ValueError) as error:
                _log.warning("cannot tell whether the run was taken over: %s", error)
