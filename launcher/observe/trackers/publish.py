"""The process that publishes a run to one tracker. It reads the run's store and tells the tracker.

`launcher.observe.trackers.tracking` starts it and gives it a `PublishRequest`. When its standard input ends, it
publishes what is left. A tracker's client may hang, crash or end its process; that is why it has a process of its
own.
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
"""The exit code where another try would fail alike."""
LAST_WORDS_S = 10.0
"""For what is still to be published when the command ends."""
_ALONE_S = 60.0  # the same, when the driver is gone and nobody waits
_TOLD = 100  # events in a run's notes, the newest
_ENDS = {"end": "finished", "failed": "failed"}


class State(BaseModel):
    """What a run's store keeps of what a tracker was told. `went_back`: times that the lineage did."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    cursor: Cursor = Cursor()
    went_back: int = 0


class Publisher:
    """Brings a tracker up to date with a store, from where the last publisher of the run left off."""

    def __init__(self, store: Store, tracker: Tracker, place: str) -> None:
        self._store, self._tracker, self._key = store, tracker, f"{place}.state.json"
        self._state = self._read()
        self._follower = LineageFollower(store, self._state.cursor)
        self._told = EventFollower(store, past=True)
        self._events: list[Record] = []

    def update(self) -> None:
        """Raises StoreError."""
        more = True
        while more:
            more = self._publish()
        new = [event for event in self._told.new() if event["kind"] not in ROUTINE]
        self._events += new
        if new:
            self._tracker.tell(story(self._events))

    def finish(self) -> None:
        """Raises StoreError."""
        self._tracker.finish(story(self._events))
        self._keep()

    def _publish(self) -> bool:
        """Return what is committed and was not told; whether there is more."""
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
    """`times_gone_back` tells apart what was logged for a step before the run went back past it, and after."""
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
    """Return the run's permanent name in this tracker; the first process that asks makes it. Raises StoreError."""
    key = f"{place}.json"
    store.put_if_absent(key, json.dumps({"id": uuid4().hex[:16]}).encode())
    return str(json.loads(store.get(key))["id"])


def open_tracker(order: PublishRequest, identifier: str) -> Tracker:
    """Raises Hopeless: the client is not installed, or has no login."""
    match order.tracker:
        case Wandb():
            return WandbRun(order, order.tracker, identifier)
        case Mlflow():
            return MlflowRun(order, order.tracker, identifier)
        case _ as never:
            assert_never(never)


def place_of(tracker: Wandb | Mlflow) -> str:
    """Return where the run's store has what it knows of its run there."""
    return f"trackers/{type(tracker).__name__.lower()}"


def publish(order: PublishRequest, ending: threading.Event, notes: TextIO) -> None:
    """Until `ending`, and then what is left. Raises whatever the tracker's client raises."""
    store, place = open_store(order.uri), place_of(order.tracker)
    publisher = Publisher(store, open_tracker(order, identity(store, place)), place)
    told = ended = False
    while not ended:
        ended = ending.is_set()  # asked before looking: what was there by then is published
        try:
            publisher.update()
        except StoreError as error:
            if not told:
                print(f"it waits for the run's store: {error.problem}", file=notes)
            told = True
        ending.wait(order.poll_s)
    publisher.finish()


def main() -> int:
    """0: all was published. HOPELESS: nothing ever will be. 1: it failed, and may be tried again."""
    notes = _private_output()
    order = PublishRequest.model_validate_json(sys.stdin.readline())
    ending = threading.Event()
    threading.Thread(target=_follow_driver, args=(ending,), name="driver", daemon=True).start()
    try:
        publish(order, ending, notes)
    except Hopeless as error:
        print(error, file=notes)
        return HOPELESS
    except RunError as error:  # a newer version wrote what is to be told
        print(error.problem, file=notes)
        return HOPELESS
    except BaseException as error:  # a client's sys.exit, too
        print(f"{type(error).__name__}: {str(error)[:300]}".replace("\n", " "), file=notes)
        return 1
    return 0


def _follow_driver(ending: threading.Event) -> None:
    """The driver closes our input, or is gone: then nobody else would end a client that hangs."""
    sys.stdin.read()
    ending.set()
    time.sleep(_ALONE_S)
    os.killpg(0, signal.SIGKILL)


def _private_output() -> TextIO:
    """Return the way to the driver, which no client prints to: standard output and error lead nowhere from now on."""
    notes = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return notes
