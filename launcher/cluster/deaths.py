"""What a run died of so far, over all its starts, in its store: `attempts/deaths.json`.

Whoever runs the command again, by hand or by a scheduler, goes on with the count, so that a failure that no start
cures ends the run. Only the newest start writes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from pydantic import TypeAdapter, ValidationError

from checkpoints.attempt import Attempt
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from launcher.policies.failures import Failure, Restart, Stop, decide

KEY = "attempts/deaths.json"
KEPT = 32  # the newest failures; the policy looks at fewer
_LONGEST = 500  # characters of an error
_RECORD = TypeAdapter(tuple[Failure, ...])


class Deaths:
    """The count, as the newest start of the run keeps it.

    Attributes:
        failures: of all starts, the newest, in order of time.
        committed: steps of the newest checkpoint known of.
    """

    def __init__(self, failures: Sequence[Failure]) -> None:
        self.failures = list(failures)
        self.committed = failures[-1].committed if failures else 0
        self._reached = 0  # steps done by the last group that died

    def add(self, failure: Failure) -> None:
        """A group died."""
        self.failures = [*self.failures, failure][-KEPT:]
        self._reached = failure.step

    def resumed(self, step: int) -> int:
        """`step` steps are in a checkpoint, and the ranks are there. Returns how many are done once more."""
        again, self._reached, self.committed = max(0, self._reached - step), 0, step
        return again

    def decide(self, nodes: int) -> Restart | Stop:
        """What the policy makes of it. A verdict that ends the run ends the count: who starts it again has mended
        something."""
        if not self.failures:
            return Restart()
        decision = decide(self.failures, nodes)
        if isinstance(decision, Stop):
            self.failures = []
        return decision


def read_deaths(store: Store, note: Callable[[str], None]) -> list[Failure]:
    """The failures on record, the oldest first. A damaged record counts as none, and is told through `note`.

    Raises StoreError.
    """
    try:
        return list(_RECORD.validate_json(store.get(KEY)))
    except KeyMissing:
        return []
    except ValidationError:
        note(f"{store.uri}/{KEY} is damaged: earlier failures of the run are not counted")
        return []


def write_deaths(store: Store, failures: Sequence[Failure]) -> None:
    """Put the newest `failures` on record, in place of what is there. Raises StoreError."""
    newest = (replace(one, error=one.error and one.error[:_LONGEST]) for one in failures[-KEPT:])
    store.put(KEY, _RECORD.dump_json(tuple(newest)))


def of_command(attempt: Attempt, *, committed: int, now: float, note: Callable[[str], None]) -> list[Failure]:
    """The failures on record, and one more if the start before `attempt` ended without a word: its driver died.

    Call it once `attempt` is claimed. `committed`: steps of the newest checkpoint; `now`: seconds since 1970.
    Raises StoreError.
    """
    store = attempt.store
    failures = read_deaths(store, note)
    if attempt.number > 1 and Attempt(store, attempt.number - 1).ended() is None:
        failures.append(_silent(committed, now))
        write_deaths(store, failures)
    return failures


def _silent(committed: int, now: float) -> Failure:
    return Failure(
        time=now,
        step=committed,
        committed=committed,
        worked=False,
        node=None,
        error=None,
        kind="silent",
    )
