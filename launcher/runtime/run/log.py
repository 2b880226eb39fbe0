"""Writes a run's metrics and events to its store as JSON lines, in numbered segments for each attempt. TensorBoard,
trackers and reports are made from these records.

The `step` of a step record is the number of steps done before that step; the `step` of an evaluation is the number of
steps done before the evaluation. Object storage cannot append, so each flush is a new object:
`metrics/a000002/00000007.jsonl`. An attempt writes only below its own number, so an attempt that was wrongly believed
dead cannot damage the records of its successor.

A thread writes, so training neither waits for the store nor fails because of it. While the store does not answer,
records wait in memory; when there are too many, the oldest are dropped, and a later event says how many. So a record
may be stored later than a checkpoint of its step, and a process that dies during an outage loses waiting records.
"""

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from data_service.store.base import Store
from data_service.store.errors import StoreError
from launcher.runtime.run.metrics import token_term
from launcher.runtime.run.packing import pack_attempt, pack_older
from launcher.runtime.run.segments import EVENTS, METRICS, segment_key, segment_prefix

OPERATOR_ATTEMPT = 0  # attempt number of events that belong to no attempt, such as changes of the recipe

_FLUSH_TIMEOUT_S = 2.0  # a checkpoint's commit waits at most this long until the records of its steps are written
_CLOSE_TIMEOUT_S = 20.0  # time limit for writing all records at the end of training
_MAX_WAITING_BYTES = 32 << 20  # limit of unwritten metrics (about 70,000 steps), and of unwritten events
_MAX_SEGMENT_BYTES = 4 << 20  # a segment is completed at this size
_CHECK_SEGMENTS = 16  # try to make a pack after this many new segments


def evaluation_record(step: int, figures: Mapping[str, float]) -> dict[str, object]:
    """Return the record of an evaluation after `step` steps. `figures`: held-out figures by name; losses in nats. The
    perplexity is added if there is a term that predicts tokens (`token_term`)."""
    record: dict[str, object] = {"kind": "evaluation", "step": step}
    if token_term(figures) is not None and (loss := token_loss(figures)) is not None:
        record["perplexity"] = math.exp(min(loss, 700.0))  # exp overflows float64 above 709
    return record | dict(figures)


def token_loss(figures: Mapping[str, Any]) -> float | None:
    """Return the loss per predicted token in nats, which can be compared with that of unigram and bigram counts. If no
    term predicts tokens, return the whole loss. None if it was not finite."""
    term = token_term(figures)
    loss = figures["loss" if term is None else f"{term}_loss"]
    return None if loss is None else float(loss)


class RunLog:
    """Collects a run's records in memory and writes them in the background. Errors of the store are never raised here.

    Call `flush_if_due` once a step, and `flush` before every commit of a checkpoint. In the background, segments are
    packed: those of older attempts, and of this attempt those that fill a pack (`launcher.runtime.run.packing`).

    Args:
        flush_seconds: seconds between two segments of metrics.
        note: function that shows a line to the operator: the store does not answer, or records are lost.
    """

    def __init__(
        self,
        store: Store,
        attempt: int,
        flush_seconds: float,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._metrics = _SegmentWriter(store, METRICS, attempt, note)
        self._events = _SegmentWriter(store, EVENTS, attempt, note)
        self._attempt = attempt
        self._flush_seconds = flush_seconds
        self._flushed_at: float | None = None
        self._submitted = threading.Event()  # whether a submitted write has not begun yet
        self._recorder = BackgroundWriter(note)
        self._store, self._looked = store, 0  # number of segments when packing was last tried
        self._packer = BackgroundWriter(note)
        self._packer.submit(partial(pack_older, store, attempt, self._packer.closing))

    def add_metrics(self, record: Mapping[str, object]) -> None:
        """Add the record of a step or an evaluation; infra/docs/records.md has the schema."""
        self._metrics.append(record)

    def pending_lines(self) -> tuple[int, tuple[str, ...]]:
        """Return the number of metrics segments written so far, and the lines that are not written yet."""
        return self._metrics.pending_lines()

    def restore(self, lines: Sequence[str]) -> None:
        """Add metrics records (JSON lines) that an earlier attempt could not write."""
        for line in lines:
            self._metrics.append(json.loads(line))

    def event(self, kind: str, time: float, **fields: object) -> None:
        """Add an event. `time`: seconds since 1970. Events are rare, so each is written at once."""
        self._events.append({"time": time, "kind": kind, "attempt": self._attempt, **fields})
        self._submit_write()

    def flush_if_due(self, now: float) -> None:
        """Start a write if `flush_seconds` have passed since the last one. `now`: monotonic clock in seconds."""
        if self._flushed_at is None:
            self._flushed_at = now
        elif now - self._flushed_at >= self._flush_seconds:
            self._submit_write()
            self._flushed_at = now

    def flush(self, patience_s: float = _FLUSH_TIMEOUT_S) -> bool:
        """Start to write the pending records, and wait at most `patience_s` seconds. Return whether all are written;
        the rest is written later."""
        self._submit_write()
        deadline = time.monotonic() + patience_s
        done = [segments.wait_until_written(deadline - time.monotonic()) for segments in (self._metrics, self._events)]
        return all(done)

    def close(self, patience_s: float = _CLOSE_TIMEOUT_S) -> bool:
        """Flush, then stop. Records that are still unwritten are lost. Return whether all were written."""
        done = self.flush(patience_s)
        self._recorder.close()
        self._packer.close()
        return done

    def _submit_write(self) -> None:
        if not self._submitted.is_set():
            self._submitted.set()
            self._recorder.submit(self._write_pending)

    def _write_pending(self) -> None:
        """Write all pending records. It runs on the recorder's thread, which repeats it after a StoreError."""
        self._submitted.clear()
        self._metrics.write()
        for segments in (self._metrics, self._events):
            if lost := segments.take_lost_count():
                about = {"time": time.time(), "kind": "records_lost", "attempt": self._attempt}
                self._events.append({**about, "what": segments.folder, "records": lost})
        self._events.write()
        if self._metrics.count - self._looked >= _CHECK_SEGMENTS:
            self._looked, closing = self._metrics.count, self._packer.closing
            self._packer.submit(partial(pack_attempt, self._store, self._attempt, closing, ended=False))


class _SegmentWriter:
    """Writes JSON lines as numbered segments below one prefix. One thread appends lines, another writes segments.

    The bytes of a segment are fixed before it is first written. So a retry, after the store has written it but its
    answer was lost, changes nothing.

    Attributes:
        count: number of segments written.
    """

    def __init__(self, store: Store, folder: str, attempt: int, note: Callable[[str], None]) -> None:
        self._store, self._attempt, self._note = store, attempt, note
        self.folder, self.count = folder, 0
        self._changed = threading.Condition()
        self._pending: deque[bytes] = deque()
        self._bytes = self._lost = 0  # bytes of pending lines; number of dropped lines
        self._sealed: bytes | None = None  # the segment that is being written

    def append(self, record: Mapping[str, object]) -> None:
        line = encode_line(record).encode()
        with self._changed:
            before = self._lost
            self._pending.append(line)
            self._bytes += len(line)
            while self._bytes > _MAX_WAITING_BYTES and len(self._pending) > 1:
                self._bytes -= len(self._pending.popleft())
                self._lost += 1
            first = self._lost > 0 and before == 0
        if first:
            self._note(
                f"more than {_MAX_WAITING_BYTES:,} bytes of {self.folder} wait for the store: the oldest are dropped"
            )

    def write(self) -> None:
        """Write all pending records. Raises StoreError; unwritten records stay pending."""
        while (data := self._seal_segment()) is not None:
            self._store.put(segment_key(self.folder, self._attempt, self.count), data)
            with self._changed:
                self.count += 1
                self._sealed = None
                self._changed.notify_all()

    def wait_until_written(self, patience_s: float) -> bool:
        """Wait until nothing is pending, at most `patience_s` seconds. Return whether nothing is pending."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending and self._sealed is None, max(0.0, patience_s))

    def pending_lines(self) -> tuple[int, tuple[str, ...]]:
        """Return the number of segments written so far, and the lines that are not written yet, in order."""
        with self._changed:
            sealed = self._sealed.splitlines() if self._sealed is not None else []
            return self.count, tuple(line.decode() for line in (*sealed, *self._pending))

    def take_lost_count(self) -> int:
        """Return the number of records dropped since the last call."""
        with self._changed:
            lost, self._lost = self._lost, 0
            return lost

    def _seal_segment(self) -> bytes | None:
        with self._changed:
            if self._sealed is None and self._pending:
                lines, size = [], 0
                while self._pending and size < _MAX_SEGMENT_BYTES:
                    lines.append(self._pending.popleft())
                    size += len(lines[-1])
                self._bytes -= size
                self._sealed = b"".join(lines)
            return self._sealed


def record_operator_event(store: Store, kind: str, time: float, **fields: object) -> None:
    """Write an event that belongs to no attempt, such as an accepted change of the recipe. It is stored on return."""
    line = encode_line({"time": time, "kind": kind, "attempt": OPERATOR_ATTEMPT, **fields}).encode()
    number = max(0, sum(1 for _ in store.list(segment_prefix("events", OPERATOR_ATTEMPT))) - 1)
    while not store.put_if_absent(key := segment_key("events", OPERATOR_ATTEMPT, number), line):
        if store.get(key) == line:  # an earlier try has stored it, but its answer was lost
            return
        number += 1


def encode_line(record: Mapping[str, object]) -> str:
    """Return `record` as one line of strict JSON. Numbers that are not finite (a skipped step's loss) become null."""
    return json.dumps(_replace_non_finite(record), separators=(",", ":"), allow_nan=False) + "\n"


def _replace_non_finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return value


_log = logging.getLogger(__name__)

_RETRY_S = 1.0  # wait after a failed write; the store itself has retried for minutes already
_MAX_WAITING_WRITES = 4096
WriteFunction = Callable[[], object]  # writes to the store; a StoreError means: try again


class BackgroundWriter:
    """Runs write functions one after another in a background thread, and repeats each until it succeeds.

    At most `_MAX_WAITING_WRITES` writes wait; then each new one drops the oldest. In each outage of the store, `note`
    tells the operator once that writes wait, and once that some are lost.

    Attributes:
        closing: event that is set by `close`.
    """

    def __init__(self, note: Callable[[str], None]) -> None:
        self._note = note
        self._waiting: deque[WriteFunction] = deque()
        self._changed = threading.Condition()
        self._busy = False
        self._told: set[str] = set()  # what the operator was told in the present outage
        self.closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def submit(self, write: WriteFunction) -> None:
        """Queue `write`. Returns at once and never raises."""
        with self._changed:
            self._waiting.append(write)
            if len(self._waiting) > _MAX_WAITING_WRITES:
                self._waiting.popleft()
                self._note_once("lost", "are too many to wait in memory until the store answers: the oldest are lost")
            self._changed.notify_all()

    def drain(self, patience_s: float) -> bool:
        """Wait until all submitted writes are done, at most `patience_s` seconds. Return whether they are."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, patience_s)

    def close(self, patience_s: float = 0.0) -> bool:
        """Wait at most `patience_s` seconds for all writes, then stop. The rest is lost. Return whether all were
        done."""
        done = self.drain(patience_s)
        with self._changed:
            self.closing.set()
            self._changed.notify_all()
        return done

    def _run(self) -> None:
        while (write := self._next_write()) is not None:
            self._retry_write(write)
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next_write(self) -> WriteFunction | None:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self.closing.is_set())
            if self.closing.is_set():
                return None
            self._busy = True
            return self._waiting.popleft()

    def _retry_write(self, write: WriteFunction) -> None:
        while not self.closing.is_set():
            try:
                write()
                self._told.clear()
                return
            except StoreError as error:
                _log.warning("records cannot be written yet: %s", error.problem)
                self._note_once("waiting", f"cannot be written yet: {error.problem}; training continues")
            except Exception as error:
                _log.exception("a record is lost, because writing it failed")
                self._note(f"a record is lost, because writing it failed: {type(error).__name__}: {error}")
                return
            self.closing.wait(_RETRY_S)

    def _note_once(self, subject: str, text: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            self._note(f"records {text}")
