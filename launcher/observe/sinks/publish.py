"""The process that publishes a run to its sinks: TensorBoard's files, W&B, MLflow, a webhook.

All sinks read the run's records in its store: each takes them in order, on a thread of its own, and its position is
stored with the run. So a sink that is slow or down delays neither training nor another sink, and the next start
continues with the records that it missed. `launcher.observe.sinks.process` starts this process and writes a
`PublishRequest` to its standard input. When that input ends, the process publishes the remaining records and ends. It
is a separate process because a sink's client library may hang, crash or end its process.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, TextIO
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError

from data_service.formats import NEWER_REMEDY, is_from_newer_version, newer_version_message
from data_service.store.base import Store
from data_service.store.errors import KeyMissing, StoreError
from data_service.store.open import open_store
from launcher.errors import RunError
from launcher.observe.inspect.report.events import ROUTINE_EVENT_KINDS, describe_event, utc_text
from launcher.observe.sinks.mlflow import MlflowRun
from launcher.observe.sinks.sink import EventSummary, PublishRequest, Sink, StepFigures, UnusableSink
from launcher.observe.sinks.tensorboard import TensorBoardFiles
from launcher.observe.sinks.wandb import WandbRun
from launcher.observe.sinks.webhook import EventPoster
from launcher.runtime.run.following import EventFollower, LineageCursor, LineageFollower
from launcher.runtime.run.metrics import tracker_figures
from launcher.runtime.run.step_table import Record

SINKS: dict[str, type[Sink]] = {
    "tensorboard": TensorBoardFiles,
    "wandb": WandbRun,
    "mlflow": MlflowRun,
    "webhook": EventPoster,
}
"""The sinks by name."""
NO_USABLE_SINK_CODE = 3
"""The exit code if no sink can be used, so that another process would not help."""
_ORPHAN_TIMEOUT_S = 60.0  # seconds to publish the remaining records after the driver died
_REOPEN_DELAY_S = 60.0  # seconds until a sink that failed is opened again
_MAX_LISTED_EVENTS = 100  # number of newest events in a summary
_MAX_REASON_CHARACTERS = 300
_STATE_BY_END_EVENT = {"end": "finished", "failed": "failed"}  # how a run ended, by the kind of its last event

Note = Callable[[str], None]  # reports a problem


class PublishState(BaseModel):
    """The stored position up to which a run was published to a sink.

    Attributes:
        cursor: position up to which records were published, in the steps that lead to the newest checkpoint.
        went_back: number of times that the run went back to an earlier step.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    cursor: LineageCursor = LineageCursor()
    went_back: int = 0


class Publisher:
    """Publishes the records of a store to a sink, and continues where the run's last publisher stopped."""

    def __init__(self, store: Store, sink: Sink, name: str) -> None:
        self._store, self._sink, self._key = store, sink, f"trackers/{name}.state.json"
        self._state = self._read_state()
        self._follower = LineageFollower(store, self._state.cursor)
        self._event_follower = EventFollower(store, past=True)
        self._events: list[Record] = []

    def update(self) -> None:
        """Publish everything that is new. Raises StoreError."""
        more = self._sink.takes_figures
        while more:
            more = self._publish_next_records()
        new = [event for event in self._event_follower.read_new() if event["kind"] not in ROUTINE_EVENT_KINDS]
        self._events += new
        if new:
            self._sink.publish_events(summarise_events(self._events, new))

    def finish(self) -> None:
        """Finish the run in the sink, and store the position. Raises StoreError."""
        self._sink.finish(summarise_events(self._events))
        if self._sink.takes_figures:
            self._store_state()

    def _publish_next_records(self) -> bool:
        """Publish the next committed records. Return whether there are more."""
        news = self._follower.read_new()
        went_back = self._state.went_back + (news.superseded_from is not None)
        if news.records or news.superseded_from is not None:
            self._sink.log([step_figures(record, went_back) for record in news.records], news.superseded_from)
        if self._follower.cursor != self._state.cursor:
            self._state = PublishState(cursor=self._follower.cursor, went_back=went_back)
            if self._sink.durable:
                self._store_state()
        return news.more

    def _read_state(self) -> PublishState:
        try:
            data = self._store.get(self._key)
            return PublishState.model_validate_json(data)
        except KeyMissing:
            return PublishState()
        except ValidationError as error:
            if is_from_newer_version(data, known=1, error=error):
                raise RunError(newer_version_message(f"{self._store.uri}/{self._key}"), remedy=NEWER_REMEDY) from error
            raise

    def _store_state(self) -> None:
        self._store.put(self._key, self._state.model_dump_json().encode())


def step_figures(record: Mapping[str, Any], rewind_count: int) -> StepFigures:
    """Return the figures of a record for a sink. Its figure `times_gone_back` tells apart rows of the same step that
    were logged before and after the run went back."""
    return StepFigures(int(record["step"]), tracker_figures(record) | {"times_gone_back": float(rewind_count)})


def summarise_events(events: Sequence[Record], new: Sequence[Record] = ()) -> EventSummary:
    """Return the summary of a run's events. `new`: those of them that no earlier summary contains."""
    counts: dict[str, int] = {}
    for event in events:
        counts[event["kind"]] = counts.get(event["kind"], 0) + 1
    lines = (f"{utc_text(float(event['time']))}  {describe_event(event)}" for event in events[-_MAX_LISTED_EVENTS:])
    last = events[-1]["kind"] if events else None
    return EventSummary(new, counts, "\n".join(lines), _STATE_BY_END_EVENT.get(str(last)))


def sink_run_id(store: Store, sink_name: str) -> str:
    """Return the run's permanent id in a sink. The first process that asks creates it. Raises StoreError."""
    key = f"trackers/{sink_name}.json"
    store.put_if_absent(key, json.dumps({"id": uuid4().hex[:16]}).encode())
    return str(json.loads(store.get(key))["id"])


def publish_until_end(sink_name: str, request: PublishRequest, ending: threading.Event, note: Note) -> None:
    """Publish a run to one sink until `ending` is set, then the remaining records. A sink that fails is opened again
    after a minute; `note` is called with the reason of each failure."""
    while True:
        try:
            _publish_to_sink(sink_name, request, ending, note)
            return
        except UnusableSink as error:
            return note(str(error))
        except RunError as error:  # a newer version wrote the records
            return note(error.problem)
        except BaseException as error:  # BaseException, because a client may call sys.exit
            note(f"{type(error).__name__}: {str(error)[:_MAX_REASON_CHARACTERS]}")
        if ending.wait(_REOPEN_DELAY_S):
            return


def _publish_to_sink(sink_name: str, request: PublishRequest, ending: threading.Event, note: Note) -> None:
    store = open_store(request.uri)
    publisher = Publisher(store, SINKS[sink_name](request, partial(sink_run_id, store, sink_name), note), sink_name)
    ended = False
    while not ended:
        ended = ending.is_set()  # read before the update, which then publishes everything recorded by now
        try:
            publisher.update()
        except StoreError as error:
            note(f"the run's store cannot be read, trying again: {error.problem}")
        ending.wait(request.poll_s)
    publisher.finish()


def main() -> int:
    """Publish a run to its sinks. Return 0 if the driver has ended this process, or NO_USABLE_SINK_CODE if no sink can
    be used."""
    output, lock = _reserve_output(), threading.Lock()
    request = PublishRequest.model_validate_json(sys.stdin.readline())
    ending = threading.Event()

    def report(name: str, problem: str | None) -> None:
        with lock:
            print(json.dumps({"sink": name, "problem": problem}), file=output)

    def serve_sink(name: str) -> None:
        publish_until_end(name, request, ending, lambda problem: report(name, problem))
        report(name, None)

    threading.Thread(target=_end_after_driver, args=(ending,), name="driver", daemon=True).start()
    threads = [threading.Thread(target=serve_sink, args=(name,), name=name, daemon=True) for name in request.sinks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return 0 if ending.is_set() else NO_USABLE_SINK_CODE


def _end_after_driver(ending: threading.Event) -> None:
    """Wait until the driver closes our input or dies. End this process `_ORPHAN_TIMEOUT_S` later, even if a client
    hangs, because no other process would end it."""
    sys.stdin.read()
    ending.set()
    time.sleep(_ORPHAN_TIMEOUT_S)
    os.killpg(0, signal.SIGKILL)


def _reserve_output() -> TextIO:
    """Return a stream to the driver that client libraries cannot print to: from now on, their output is discarded."""
    output = os.fdopen(os.dup(1), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    return output
