"""The process that publishes a run to one tracker. It reads the run's store and logs the records to the tracker.

`launcher.observe.trackers.tracking` starts it and writes a `PublishRequest` to its standard input. When that input
ends, it publishes the remaining records and ends. It is a separate process because a tracker's client may hang, crash
or end its process.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, TextIO, assert_never
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from data_service.formats import REMEDY, is_newer, newer
from data_service.store.base import Store
from data_service.store.errors import KeyMissing, StoreError
from data_service.store.open import open_store
from launcher.errors import RunError
from launcher.observe.trackers.clients import (
    EventSummary,
    Hopeless,
    MlflowRun,
    PublishRequest,
    StepFigures,
    Tracker,
    WandbRun,
)
from launcher.observe.trackers.webhook import ROUTINE
from launcher.runtime.recipe.operation import Mlflow, Wandb
from launcher.runtime.run.following import Cursor, EventFollower, LineageFollower
from launcher.runtime.run.metrics import figures
from launcher.runtime.run.step_table import Record

HOPELESS = 3
"""The exit code if another try would fail too."""
LAST_WORDS_S = 10.0
"""Seconds for publishing the remaining records when the command ends."""
_ALONE_S = 60.0  # seconds for that if the driver is gone, so that nobody waits
_TOLD = 100  # number of newest events in the run's notes
_ENDS = {"end": "finished", "failed": "failed"}


class State(BaseModel):
    """How far a run was published to a tracker, as its store keeps it.

    Attributes:
        cursor: position in the lineage up to which records were published.
        went_back: number of times that the lineage went back.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    cursor: Cursor = Cursor()
    went_back: int = 0


class Publisher:
    """Publishes the records of a store to a tracker, and continues where the run's last publisher stopped."""

    def __init__(self, store: Store, tracker: Tracker, place: str) -> None:
        self._store, self._tracker, self._key = store, tracker, f"{place}.state.json"
        self._state = self._read()
        self._follower = LineageFollower(store, self._state.cursor)
        self._told = EventFollower(store, past=True)
        self._events: list[Record] = []

    def update(self) -> None:
        """Publish everything that is new. Raises StoreError."""
        more = True
        while more:
            more = self._publish()
        new = [event for event in self._told.new() if event["kind"] not in ROUTINE]
        self._events += new
        if new:
            self._tracker.tell(story(self._events))

    def finish(self) -> None:
        """Finish the tracker's run and store how far it was published. Raises StoreError."""
        self._tracker.finish(story(self._events))
        self._keep()

    def _publish(self) -> bool:
        """Publish the next committed records. Return whether there are more."""
        news = self._follower.new()
        went_back = self._state.went_back + (news.superseded_from is not None)
        if news.records:
            self._tracker.log([row_of(record, went_back) for record in news.records])
        if self._follower.cursor != self._state.cursor:
            self._state = State(cursor=self._follower.cursor, went_back=went_back)
            if self._tracker.sure:
                self._keep()
        return news.more

    def _read(self) -> State:
        try:
            data = self._store.get(self._key)
            return State.model_validate_json(data)
        except KeyMissing:
            return State()
        except ValidationError as error:
            if is_newer(data, known=1, error=error):
                raise RunError(newer(f"{self._store.uri}/{self._key}"), remedy=REMEDY) from error
            raise

    def _keep(self) -> None:
        self._store.put(self._key, self._state.model_dump_json().encode())


def row_of(record: Mapping[str, Any], went_back: int) -> StepFigures:
    """Return the figures of a record for a tracker. `times_gone_back` among them tells apart the rows of a step that
    were logged before and after the run went back."""
    return StepFigures(int(record["step"]), figures(record) | {"times_gone_back": float(went_back)})


def story(events: Sequence[Mapping[str, Any]]) -> EventSummary:
    counts: dict[str, int] = {}
    for event in events:
        counts[event["kind"]] = counts.get(event["kind"], 0) + 1
    last = events[-1]["kind"] if events else None
    return EventSummary(counts, "\n".join(map(_line, events[-_TOLD:])), _ENDS.get(str(last)))


def _line(event: Mapping[str, Any]) -> str:
    when = f"{datetime.fromtimestamp(float(event['time']), UTC):%Y-%m-%d %H:%M:%S}"
    step = f" at step {event['step']}" if event.get("step") is not None else ""
    why = next((str(event[key]) for key in ("reason", "cause", "what", "changes") if event.get(key)), "")
    return f"{when}  {event['kind']}{step}{': ' + why if why else ''}"


def identity(store: Store, place: str) -> str:
    """Return the run's permanent id in this tracker. The first process that asks creates it. Raises StoreError."""
    key = f"{place}.json"
    store.put_if_absent(key, json.dumps({"id": uuid4().hex[:16]}).encode())
    return str(json.loads(store.get(key))["id"])


def open_tracker(order: PublishRequest, identifier: str) -> Tracker:
    """Open the run in the tracker. Raises Hopeless: the client is not installed, has no login, or no server is
    named."""
    match order.tracker:
        case Wandb():
            return WandbRun(order, order.tracker, identifier)
        case Mlflow():
            return MlflowRun(order, order.tracker, identifier)
        case _ as never:
            assert_never(never)


def place_of(tracker: Wandb | Mlflow) -> str:
    """Return the prefix of the keys, in the run's store, of the files about a tracker."""
    return f"trackers/{type(tracker).__name__.lower()}"


def publish(order: PublishRequest, ending: threading.Event, notes: TextIO) -> None:
    """Publish a run until `ending` is set, then the remaining records. Raises whatever the tracker's client raises."""
    store, place = open_store(order.uri), place_of(order.tracker)
    publisher = Publisher(store, open_tracker(order, identity(store, place)), place)
    told = ended = False
    while not ended:
        ended = ending.is_set()  # read before the update, which then publishes everything recorded by now
        try:
            publisher.update()
        except StoreError as error:
            if not told:
                print(f"it waits for the run's store: {error.problem}", file=notes)
            told = True
        ending.wait(order.poll_s)
    publisher.finish()


def main() -> int:
    """Publish a run and return the exit code. 0: everything was published. HOPELESS: another try would fail too. 1: it
    failed, and may be tried again."""
    notes = _private_output()
    order = PublishRequest.model_validate_json(sys.stdin.readline())
    ending = threading.Event()
    threading.Thread(target=_follow_driver, args=(ending,), name="driver", daemon=True).start()
    try:
        publish(order, ending, notes)
    except Hopeless as error:
        print(error, file=notes)
        return HOPELESS
    except RunError as error:  # a newer version wrote the records
        print(error.problem, file=notes)
        return HOPELESS
    except BaseException as error:  # a client's sys.exit, too
        print(f"{type(error).__name__}: {str(error)[:300]}".replace("\n", " "), file=notes)
        return 1
    return 0


def _follow_driver(ending: threading.Event) -> None:
    """Wait until the driver closes our input or is gone. Then end this process after a while, even if the client
    hangs: nobody else would end it."""
    sys.stdin.read()
    ending.set()
    time.sleep(_ALONE_S)
    os.killpg(0, signal.SIGKILL)


def _private_output() -> TextIO:
    """Return a stream to the driver to which no client prints. Standard output and error are discarded from now on."""
    notes = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return notes
