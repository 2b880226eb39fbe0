"""The committed records of a run, each as soon as a checkpoint holds what it tells of.

Records that no checkpoint covers yet may be repeated by the next attempt, so nobody outside is told of them. Only a run
that goes back past a commit (a rewind, a damaged checkpoint) records anew what was told already.
"""

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict

from checkpoints.attempt import Attempt
from checkpoints.layout import Mark
from checkpoints.listing import committed
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from launcher.metrics import segment_key

Record = dict[str, Any]


class Cursor(BaseModel):
    """How far somebody has read: what they have not yet been given begins with this record of this segment.

    Attributes:
        steps: done, as far as they have been given.
        went_back: times that the lineage did.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    attempt: int = 1
    segment: int = 0
    index: int = 0
    steps: int = 0
    went_back: int = 0


@dataclass(frozen=True)
class _Pending:
    attempt: int
    segment: int
    index: int
    record: Record

    @property
    def steps(self) -> int:
        """Steps done when it was true."""
        return int(self.record["step"]) + int(self.record["kind"] == "step")


class LineageFollower:
    """Reads on from a cursor. Raises StoreError; a later call goes on from there."""

    def __init__(self, store: Store, cursor: Cursor | None = None) -> None:
        cursor = cursor or Cursor()
        self._store = store
        self._attempt, self._segment, self._skip = cursor.attempt, cursor.segment, cursor.index
        self._steps, self._went_back = cursor.steps, cursor.went_back
        self._pending: deque[_Pending] = deque()
        self._read = Mark(cursor.attempt, cursor.steps)  # how far steps are recorded

    @property
    def cursor(self) -> Cursor:
        """After what was given last."""
        first = self._pending[0] if self._pending else _Pending(self._attempt, self._segment, self._skip, {})
        return Cursor(
            attempt=first.attempt,
            segment=first.segment,
            index=first.index,
            steps=self._steps,
            went_back=self._went_back,
        )

    def new(self) -> list[tuple[int, Record]]:
        """What has been committed since the last call, in order, each with how often the lineage had gone back.

        A record takes the place of those given earlier for its step and later ones.
        """
        for pending in self._unread():
            self._add(pending)
        marks = committed(self._store)
        if not marks or self._read < marks[0]:
            return []  # the records of a commit may come after it
        return [(self._went_back, record) for record in self._released(marks[0])]

    def _released(self, mark: Mark) -> Iterator[Record]:
        while (
            self._pending and self._pending[0].attempt <= mark.attempt and self._pending[0].steps <= mark.step
        ):
            first = self._pending.popleft()
            if first.record["kind"] == "step":
                self._went_back += first.steps <= self._steps
                self._steps = first.steps
            yield first.record

    def _add(self, new: _Pending) -> None:
        """A step makes those recorded for it and for later ones before void."""
        while new.record["kind"] == "step" and self._pending and self._pending[-1].steps >= new.steps:
            self._pending.pop()
        self._pending.append(new)
        if new.record["kind"] == "step":
            self._read = Mark(new.attempt, new.steps)

    def _unread(self) -> Iterator[_Pending]:
        left = True
        while left:  # asked before reading: then all of this attempt's records have come
            left = Attempt(self._store, self._attempt + 1).claimed()
            yield from self._unread_of(self._attempt)
            if left:
                self._attempt, self._segment = self._attempt + 1, 0

    def _unread_of(self, attempt: int) -> Iterator[_Pending]:
        while True:
            try:
                lines = self._store.get(segment_key("metrics", attempt, self._segment)).splitlines()
            except KeyMissing:
                return
            number, skip = self._segment, self._skip
            self._segment, self._skip = number + 1, 0
            for index, line in enumerate(lines):
                if index >= skip:
                    yield _Pending(attempt, number, index, json.loads(line))
