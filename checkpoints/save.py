"""Saving, while training goes on: a copy in memory, an upload in the background, one collective commit.

    begin    every rank copies its fragments (the only time training waits) and starts to upload them
    ready    every rank: has my upload ended, with or without an error? The trainer asks in every step
    commit   all ranks at the same step, once all are ready: rank 0 gathers receipts or errors, checks that they
             cover everything and that no newer attempt runs, writes the manifest by conditional put, and tells

Until the manifest exists, nothing is saved, and what is stored lies in the attempt's own folder. An error on some rank
reaches all ranks in the exchange, so all return the same outcome.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from pydantic import JsonValue, TypeAdapter

from checkpoints.attempt import Attempt
from checkpoints.commit import Commit, Committed, Outcome, RankReceipt, outcome_of
from checkpoints.errors import CheckpointError
from checkpoints.gather import Peers
from checkpoints.layout import CheckpointManifest, CheckpointName
from checkpoints.snapshot import Snapshot, take
from data_service.store.base import Store
from data_service.store.errors import TRANSIENT, StoreError
from encoder_core.train.zero_state import Fragment

_log = logging.getLogger(__name__)

_MOMENT_S = 1.0
_ANSWERS = TypeAdapter(list[tuple[bool, int]])


@dataclass(frozen=True)
class _Underway:
    step: int
    snapshot: Snapshot
    shapes: dict[str, tuple[int, ...]]
    own_kinds: dict[str, tuple[str, ...]]
    memory: dict[str, tuple[int, ...]]
    state: str
    blocked_s: float
    upload: "Future[RankReceipt]"


class Saver:
    """Writes the checkpoints of one attempt; every rank has one.

    Args:
        store: the run's.
        attempt: the attempt that was claimed, the same on all ranks.
        peers: the ranks, on a process group of their own.
        resumed: the checkpoint this attempt started from, None if from nothing.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        store: Store,
        attempt: Attempt,
        peers: Peers,
        *,
        resumed: CheckpointManifest | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._peers = peers
        self._clock = clock
        self._past = resumed.lineage if resumed else ()
        self._begun_at = resumed.step if resumed else 0
        self._last = resumed.step if resumed else None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._underway: _Underway | None = None
        self._memory: Snapshot | None = None
        self._sent = 0

    @property
    def last_step(self) -> int | None:
        """The step of the newest checkpoint this run goes on from: committed here, or resumed from."""
        return self._last

    @property
    def underway(self) -> int | None:
        """The step being saved, begun and not yet committed."""
        return self._underway.step if self._underway else None

    @property
    def sent(self) -> int:
        """Bytes of the newest save that this rank has uploaded so far."""
        return self._sent

    def begin(
        self,
        step: int,
        fragments: Iterable[Fragment],
        shapes: dict[str, tuple[int, ...]],
        state: dict[str, JsonValue],
        memory: Mapping[str, tuple[int, ...]] | None = None,
        own_kinds: Mapping[str, tuple[str, ...]] | None = None,
    ) -> None:
        """Copies this rank's fragments and starts to upload them. The trainer may change them on return.

        Args:
            step: steps taken; greater than `last_step`.
            shapes: of every parameter of the model, by name.
            state: whatever else a resume needs, as JSON without NaN; rank 0's is stored.
            memory: shapes of the model's memory, by name, if the checkpoint is to hold it; rank 0's are stored.
            own_kinds: of state, for parameters that have others than the rest, by name; rank 0's are stored.

        Raises:
            CheckpointError: a save is under way, the step is not a new one, or a fragment is malformed.
        """
        if self._underway is not None:
            raise CheckpointError(
                f"cannot save step {step} while step {self._underway.step} is being saved",
                remedy="commit the save under way first",
            )
        if self._last is not None and step <= self._last:
            raise CheckpointError(f"step {step} is saved already", remedy="save only after `last_step`")
        text = json.dumps(state, allow_nan=False)
        started = time.perf_counter()
        snapshot = take(fragments, self._memory.body if self._memory else None)
        self._memory = snapshot
        blocked = time.perf_counter() - started
        self._sent = 0
        upload = self._worker.submit(self._upload, step, snapshot, blocked)
        self._underway = _Underway(
            step=step,
            snapshot=snapshot,
            shapes=dict(shapes),
            own_kinds=dict(own_kinds or {}),
            memory=dict(memory or {}),
            state=text,
            blocked_s=blocked,
            upload=upload,
        )

    def ready(self) -> bool:
        """Whether a save is under way and this rank's part of it has ended, with or without an error."""
        return self._underway is not None and self._underway.upload.done()

    def wait(self) -> None:
        """Blocks until this rank's part of the save under way, if any, is over."""
        if self._underway is not None:
            self._underway.upload.exception()

    def wait_for_all(self, progress: Callable[[int], None]) -> None:
        """Blocks until the save under way is over on every rank. Collective. It consists of many short collectives, so
        that none outlasts a group's timeout. About once a second `progress` is told how many bytes all ranks have
        uploaded."""
        while True:
            self._wait_a_moment()
            answers = self._peers.all_gather([self._underway is None or self.ready(), self.sent])
            ready, sent = zip(*_ANSWERS.validate_python(answers), strict=True)
            progress(sum(sent))
            if all(ready):
                return

    def _wait_a_moment(self) -> None:
        if self._underway is not None:
            wait([self._underway.upload], timeout=_MOMENT_S)

    def commit(self) -> Outcome:
        """Finishes the save under way, on all ranks together; waits for those that are not ready.

        Raises:
            Superseded: on all ranks, if a newer attempt has been claimed. This one must end.
            CheckpointError: no save is under way.
        """
        if self._underway is None:
            raise CheckpointError("no save is under way", remedy="call `begin` before `commit`")
        underway, self._underway = self._underway, None
        answers = self._peers.gather_to_first(self._answer(underway.upload))
        verdict = self._commit(underway).decide(answers) if self._peers.rank == 0 else None
        outcome = outcome_of(underway.step, self._peers.from_first(verdict))
        if isinstance(outcome, Committed):
            self._last = outcome.step
        return outcome

    def close(self) -> None:
        """Ends the background thread; a save under way is abandoned."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _upload(self, step: int, snapshot: Snapshot, blocked_s: float) -> RankReceipt:
        started = time.perf_counter()
        file = snapshot.describe(CheckpointName(self._attempt.number, step).file(self._peers.rank))
        self._store.put_buffers(file.key, snapshot.buffers, self._note_sent)
        seconds = time.perf_counter() - started
        return RankReceipt(
            step=step, file=file, pieces=snapshot.pieces, blocked_s=blocked_s, background_s=seconds
        )

    def _note_sent(self, count: int) -> None:
        self._sent = count

    def _answer(self, upload: "Future[RankReceipt]") -> JsonValue:
        error = upload.exception()
        if error is None:
            return upload.result().model_dump(mode="json")
        _log.error("rank %d could not save", self._peers.rank, exc_info=error)
        text = error.problem if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
        return {"error": f"rank {self._peers.rank}: {text}", "transient": isinstance(error, TRANSIENT)}

    def _commit(self, underway: _Underway) -> Commit:
        return Commit(
            store=self._store,
            attempt=self._attempt,
            past=self._past,
            begun_at=self._begun_at,
            step=underway.step,
            shapes=underway.shapes,
            own_kinds=underway.own_kinds,
            memory=underway.memory,
            state=json.loads(underway.state),
            now=self._clock(),
        )
