"""Metrics and events: JSON lines in segments per attempt, in the run's store. They are the truth about a run.

A step record's `step` is the number of steps done before it; an evaluation's, the number done when it was
made. Object storage cannot append, so each flush is a new object: `metrics/a000002/00000007.jsonl`. An
attempt writes only below its own number; a zombie can therefore never damage what its successor writes.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from data_service.store.base import Store
from launcher.segments import segment_key, segment_prefix
from launcher.terms import token_term

OPERATOR = 0  # the "attempt" of events that happen between attempts, by the operator's hand


def evaluation_record(step: int, figures: Mapping[str, float]) -> dict[str, object]:
    """Held-out figures after `step` steps (`loss`, `mlm_loss`, `mlm_accuracy`, ...) in nats, and the perplexity of
    the language-model term."""
    perplexity = math.exp(min(token_loss(figures), 700.0))  # beyond it a double overflows
    return {"kind": "evaluation", "step": step, "perplexity": perplexity, **figures}


def token_loss(figures: Mapping[str, Any]) -> float:
    """The loss on hidden tokens, the only one that counting unigrams and bigrams can be compared with."""
    return float(figures[f"{token_term(figures)}_loss"])


class Journal:
    """One attempt's metrics and events: kept in memory until a flush, which the caller's loop decides on.

    It starts no thread. Call `flush_due` once a step, and `flush` before every commit, so that what a
    checkpoint says happened is on record when the checkpoint is.
    """

    def __init__(self, store: Store, attempt: int, flush_seconds: float) -> None:
        self._segments = (_Segments(store, "metrics", attempt), _Segments(store, "events", attempt))
        self._attempt = attempt
        self._flush_seconds = flush_seconds
        self._flushed_at: float | None = None

    def metric(self, record: Mapping[str, object]) -> None:
        """A step's or an evaluation's record; the schema is in launcher/README.md."""
        self._segments[0].append(record)

    def event(self, kind: str, time: float, **fields: object) -> None:
        """`time` in seconds since the epoch. An event is rare and worth a write of its own: it flushes."""
        self._segments[1].append({"time": time, "kind": kind, "attempt": self._attempt, **fields})
        self.flush()

    def flush_due(self, now: float) -> None:
        """Flush if `flush_seconds` have passed since the last one; `now` on a monotonic clock, in seconds."""
        if self._flushed_at is None:
            self._flushed_at = now
        elif now - self._flushed_at >= self._flush_seconds:
            self.flush()
            self._flushed_at = now

    def flush(self) -> None:
        """Write what is pending. Raises StoreError; what was not written stays pending."""
        for segments in self._segments:
            segments.flush()


class _Segments:
    """Numbered objects of JSON lines below one prefix."""

    def __init__(self, store: Store, folder: str, attempt: int) -> None:
        self._store = store
        self._folder, self._attempt = folder, attempt
        self._next = 0
        self._pending: list[str] = []

    def append(self, record: Mapping[str, object]) -> None:
        self._pending.append(encode(record))

    def flush(self) -> None:
        if not self._pending:
            return
        key = segment_key(self._folder, self._attempt, self._next)
        self._store.put(key, "".join(self._pending).encode())
        self._next += 1
        self._pending.clear()


def operator_event(store: Store, kind: str, time: float, **fields: object) -> None:
    """An event between attempts (an accepted change of recipe, say), durable on return."""
    line = encode({"time": time, "kind": kind, "attempt": OPERATOR, **fields}).encode()
    number = sum(1 for _ in store.list(segment_prefix("events", OPERATOR)))
    while not store.put_if_absent(segment_key("events", OPERATOR, number), line):
        number += 1


def encode(record: Mapping[str, object]) -> str:
    """One line of strict JSON; a number that is not finite (a skipped step's loss) becomes null."""
    return json.dumps(_finite(record), separators=(",", ":"), allow_nan=False) + "\n"


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
