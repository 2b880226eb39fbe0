"""Saving, while training goes on: a copy in memory, an upload in the background, one collective commit.

    begin    every rank copies its fragments (the only time training waits) and starts to upload them
    ready    every rank: has my upload ended, with or without an error? The trainer asks in every step
    commit   all ranks at the same step, once all are ready: rank 0 gathers receipts or errors, checks that they
             cover everything and that no newer attempt runs, writes the manifest by conditional put, and tells

Until the manifest exists, nothing is saved, and what is stored lies in the attempt's own folder. An error on some rank
reaches all ranks in the exchange, so all return the same outcome.

A rank's copy is a safetensors file laid out in memory: 8 bytes of header length, a JSON header, then the tensors
(https://github.com/huggingface/safetensors#format). Fragments are copied straight to their places in the body, and
hashing and uploading read from it, so there is no second copy. The body is kept from one save to the next, because
fresh pages cost more than the copy.
"""

import json
import logging
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from pydantic import JsonValue, TypeAdapter
from torch import Tensor

from checkpoints.attempt import Attempt
from checkpoints.commit import Commit, Committed, Outcome, RankReceipt, outcome_of
from checkpoints.errors import CheckpointError
from checkpoints.gather import Peers
from checkpoints.layout import CHUNK, ITEM, CheckpointManifest, CheckpointName, File, StoredRange
from data_service.store.base import Store, chunk_digests
from data_service.store.errors import TRANSIENT, StoreError
from encoder_core.train.zero_state import Fragment


@dataclass(frozen=True)
class Snapshot:
    """A file's bytes, and which tensor ranges lie where in them.

    Attributes:
        header: the bytes before the body.
        body: [bytes] uint8 on the CPU.
        pieces: with offsets from the start of the file, and `file` 0.
    """

    header: bytes
    body: UInt8[Tensor, " bytes"]
    pieces: tuple[StoredRange, ...]

    @property
    def buffers(self) -> list[memoryview]:
        return [memoryview(self.header), self.body.numpy().data]

    def describe(self, key: str) -> File:
        """The file this snapshot becomes, hashed (seconds for gigabytes)."""
        size = len(self.header) + self.body.numel()
        return File(key=key, size=size, chunk=CHUNK, hashes=chunk_digests(self.buffers, CHUNK))


def take(fragments: Iterable[Fragment], reuse: UInt8[Tensor, " bytes"] | None = None) -> Snapshot:
    """Copies the fragments into one file's layout. The body `reuse` of an earlier snapshot is used again if it fits.

    Raises:
        CheckpointError: a fragment's tensors are not one-dimensional float32 of one length.
    """
    held = [fragment for fragment in fragments if _length(fragment)]
    tensors = [(fragment, kind, tensor) for fragment in held for kind, tensor in fragment.tensors.items()]
    header, starts = _header(tensors)
    size = sum(tensor.numel() for _, _, tensor in tensors) * ITEM
    pinned = any(tensor.is_cuda for _, _, tensor in tensors)
    fits = reuse is not None and reuse.numel() == size
    body = reuse if reuse is not None and fits else torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    for (_, _, tensor), start in zip(tensors, starts, strict=True):
        body[start : start + tensor.numel() * ITEM].view(torch.float32).copy_(
            tensor.detach(), non_blocking=pinned
        )
    if pinned:
        torch.cuda.synchronize()
    return Snapshot(header, body, _pieces(tensors, starts, len(header)))


def _length(fragment: Fragment) -> int:
    lengths = {tensor.numel() for tensor in fragment.tensors.values()}
    plain = all(tensor.dtype == torch.float32 and tensor.dim() == 1 for tensor in fragment.tensors.values())
    if len(lengths) != 1 or not plain:
        shapes = {kind: f"{tensor.dtype}{list(tensor.shape)}" for kind, tensor in fragment.tensors.items()}
        raise CheckpointError(
            f"fragment of {fragment.name!r} at element {fragment.start} holds {shapes}",
            remedy="give one-dimensional float32 tensors of one length",
        )
    return lengths.pop()


def _header(tensors: list[tuple[Fragment, str, Tensor]]) -> tuple[bytes, list[int]]:
    """The file's bytes before its body, and where each tensor starts in the body."""
    entries, starts, end = {}, [], 0
    for fragment, kind, tensor in tensors:
        start, end = end, end + tensor.numel() * ITEM
        starts.append(start)
        name = f"{fragment.name}:{kind}:{fragment.start}"
        entries[name] = {"dtype": "F32", "shape": [tensor.numel()], "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the body is aligned
    return struct.pack("<Q", len(text)) + text, starts


def _pieces(
    tensors: list[tuple[Fragment, str, Tensor]], starts: list[int], shift: int
) -> tuple[StoredRange, ...]:
    offsets: dict[tuple[str, int], dict[str, int]] = {}
    stops: dict[tuple[str, int], int] = {}
    for (fragment, kind, tensor), start in zip(tensors, starts, strict=True):
        where = (fragment.name, fragment.start)
        offsets.setdefault(where, {})[kind] = shift + start
        stops[where] = fragment.start + tensor.numel()
    return tuple(
        StoredRange(name=name, start=start, stop=stops[name, start], file=0, offsets=found)
        for (name, start), found in offsets.items()
    )


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
