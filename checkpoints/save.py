"""Saving while training continues: a copy in memory, an upload in the background, one collective commit.

    begin    on every rank: copy its fragments of the state (training waits for this alone) and start to upload them
    ready    on every rank: tell whether its upload has ended, with or without an error; the trainer asks at every step
    commit   on all ranks at the same step, once all are ready: rank 0 gathers receipts or errors, checks that the
             pieces cover everything and that no newer attempt has been claimed, writes the manifest by conditional
             put, and sends the outcome to all ranks

Until the manifest exists, no checkpoint exists: there are only files in the attempt's own folder. An error on one rank
reaches all ranks in the exchange, so all return the same outcome.

A rank's copy is a safetensors file laid out in memory: 8 bytes of header length, a JSON header, then the tensors
(https://github.com/huggingface/safetensors#format). Fragments are copied straight to their places in the body. Hashing
and uploading read from the body, so there is no second copy. The body is used again by the next save, because new
memory pages cost more time than the copy.
"""

import json
import logging
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from jaxtyping import Float32, UInt8
from pydantic import JsonValue, TypeAdapter
from torch import Tensor

from checkpoints.attempt import Attempt
from checkpoints.commit import SAVE_OUTCOME_TYPE, Commit, CommittedSave, RankReceipt, SaveOutcome
from checkpoints.errors import CheckpointError
from checkpoints.gather import Peers, broadcast_or_raise, gather_as
from checkpoints.layout import CHUNK_BYTES, F32_BYTES, CheckpointManifest, CheckpointName, RankFile, StoredRange
from data_service.store.base import Store, chunk_digests
from data_service.store.errors import RETRYABLE_ERRORS, StoreError
from encoder_core.train.zero_state import Fragment


@dataclass(frozen=True)
class Snapshot:
    """The bytes of one rank's file, and the ranges of tensors in it.

    Attributes:
        header: bytes of the file before its body.
        body: [bytes] uint8 on the CPU, the rest of the file.
        pieces: ranges of tensors, with offsets from the start of the file, and `file` 0.
    """

    header: bytes
    body: UInt8[Tensor, " bytes"]
    pieces: tuple[StoredRange, ...]

    @property
    def buffers(self) -> list[memoryview]:
        return [memoryview(self.header), self.body.numpy().data]

    def hash_to_rank_file(self, key: str) -> RankFile:
        """Hash the snapshot; return the description of the file `key` that holds it. Takes seconds for gigabytes."""
        size = len(self.header) + self.body.numel()
        return RankFile(key=key, size=size, chunk=CHUNK_BYTES, hashes=chunk_digests(self.buffers, CHUNK_BYTES))


def take_snapshot(fragments: Iterable[Fragment], reusable_body: UInt8[Tensor, " bytes"] | None = None) -> Snapshot:
    """Copy the fragments into the layout of one file. `reusable_body`: the body of an earlier snapshot, used again
    if it fits.

    Raises:
        CheckpointError: the tensors of a fragment are not one-dimensional float32 tensors of the same length.
    """
    held = [fragment for fragment in fragments if _fragment_length(fragment)]
    pieces, size = plan_body(held, rank=0)
    header = _file_header(pieces)
    body = reusable_body
    if body is None or body.numel() != size:
        on_gpu = any(tensor.is_cuda for fragment in held for tensor in fragment.tensors.values())
        body = torch.empty(size, dtype=torch.uint8, pin_memory=on_gpu)
    copy_to_body(held, body.view(torch.float32))
    return Snapshot(header, body, tuple(_shift_offsets(piece, len(header)) for piece in pieces))


def plan_body(fragments: Sequence[Fragment], rank: int) -> tuple[tuple[StoredRange, ...], int]:
    """Return the ranges of tensors in a file's body, with offsets from its first byte, and the body's size in bytes."""
    pieces, end = [], 0
    for fragment in fragments:
        offsets, length = {}, 0
        for kind, tensor in fragment.tensors.items():
            length = tensor.numel()
            offsets[kind], end = end, end + length * F32_BYTES
        if length:
            stop = fragment.start + length
            pieces.append(StoredRange(name=fragment.name, start=fragment.start, stop=stop, file=rank, offsets=offsets))
    return tuple(pieces), end


def copy_to_body(fragments: Sequence[Fragment], body: Float32[Tensor, " elements"]) -> None:
    """Copy the tensors into `body`, end to end. Waits until copies from a GPU have ended."""
    end, on_gpu = 0, False
    for fragment in fragments:
        for tensor in fragment.tensors.values():
            body[end : end + tensor.numel()].copy_(tensor.detach(), non_blocking=True)
            end, on_gpu = end + tensor.numel(), on_gpu or tensor.is_cuda
    if on_gpu:
        torch.cuda.synchronize()


def _shift_offsets(piece: StoredRange, header_bytes: int) -> StoredRange:
    offsets = {kind: header_bytes + offset for kind, offset in piece.offsets.items()}
    return piece.model_copy(update={"offsets": offsets})


def _fragment_length(fragment: Fragment) -> int:
    """Return the number of elements of each tensor of a fragment. Raises CheckpointError if they are malformed."""
    lengths = {tensor.numel() for tensor in fragment.tensors.values()}
    plain = all(tensor.dtype == torch.float32 and tensor.dim() == 1 for tensor in fragment.tensors.values())
    if len(lengths) != 1 or not plain:
        shapes = {kind: f"{tensor.dtype}{list(tensor.shape)}" for kind, tensor in fragment.tensors.items()}
        raise CheckpointError(
            f"the tensors of a fragment must be one-dimensional float32 of the same length, but the fragment of "
            f"{fragment.name!r} at element {fragment.start} holds {shapes}",
            remedy="flatten the tensors and convert them to float32",
        )
    return lengths.pop()


def _file_header(pieces: Sequence[StoredRange]) -> bytes:
    """Return the safetensors header of a file whose body holds the pieces."""
    entries = {
        f"{piece.name}:{kind}:{piece.start}": {
            "dtype": "F32",
            "shape": [piece.stop - piece.start],
            "data_offsets": [offset, offset + (piece.stop - piece.start) * F32_BYTES],
        }
        for piece in pieces
        for kind, offset in piece.offsets.items()
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # padding aligns the body to 8 bytes
    return struct.pack("<Q", len(text)) + text


_log = logging.getLogger(__name__)

_PROGRESS_INTERVAL_S = 1.0  # seconds between two reports of the uploaded bytes
_UPLOAD_STATE_TYPE = TypeAdapter(tuple[bool, int])  # whether a rank's upload has ended, and the bytes uploaded


@dataclass(frozen=True)
class _PendingSave:
    commit: Commit
    upload: "Future[RankReceipt]"


class Saver:
    """The writer of an attempt's checkpoints on one rank.

    Args:
        attempt: the attempt that was claimed, the same on all ranks.
        peers: the ranks, joined by a process group that nothing else uses.
        resumed: manifest of the state that this attempt resumed from; None if it began at step 0.
        stored: if `resumed` describes a state in memory, the step of the newest checkpoint of its history in the
            store; None if there is none.
        clock: function that returns the time in seconds since 1970.
    """

    def __init__(
        self,
        store: Store,
        attempt: Attempt,
        peers: Peers,
        *,
        resumed: CheckpointManifest | None = None,
        stored: int | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._peers = peers
        self._clock = clock
        self._past = resumed.lineage if resumed else ()
        self._begun_at = resumed.step if resumed else 0
        self._last = resumed.step if resumed is not None and not resumed.is_in_memory else stored
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: _PendingSave | None = None
        self._memory: Snapshot | None = None  # newest copy, whose body the next save uses again
        self._sent = 0

    @property
    def last_step(self) -> int | None:
        """The step of the newest checkpoint: the last one committed here, or else the one resumed from; or None."""
        return self._last

    @property
    def pending_step(self) -> int | None:
        """The step that is being saved: begun and not yet committed; None if no save is under way."""
        return self._pending.commit.step if self._pending else None

    @property
    def sent_bytes(self) -> int:
        """Bytes that this rank has uploaded so far of its newest save."""
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
        """Copy this rank's fragments and start to upload the copy. The caller may change the fragments afterwards.

        Args:
            step: number of steps taken; greater than `last_step`.
            fragments: ranges of parameters, optimizer state and memory that this rank holds.
            shapes: shape of every parameter of the model, by name.
            state: other state that a resume needs, as JSON without NaN. Rank 0's is stored.
            memory: shapes of the model's memory, by name, if the checkpoint is to hold it. Rank 0's are stored.
            own_kinds: kinds of state, by name, of parameters whose kinds differ from the rest. Rank 0's are stored.

        Raises:
            CheckpointError: a save is under way, `step` is not greater than `last_step`, or a fragment is malformed.
        """
        if self._pending is not None:
            raise CheckpointError(
                f"cannot save step {step} while step {self._pending.commit.step} is being saved",
                remedy="commit the save under way first",
            )
        if self._last is not None and step <= self._last:
            raise CheckpointError(
                f"cannot save step {step}: the newest checkpoint is of step {self._last} already",
                remedy="call `begin` only with steps after `last_step`",
            )
        copied = json.loads(json.dumps(state, allow_nan=False))
        started = time.perf_counter()
        snapshot = take_snapshot(fragments, self._memory.body if self._memory else None)
        self._memory = snapshot
        blocked = time.perf_counter() - started
        self._sent = 0
        upload = self._worker.submit(self._upload, step, snapshot, blocked)
        commit = Commit(
            store=self._store,
            attempt=self._attempt,
            past=self._past,
            begun_at=self._begun_at,
            step=step,
            shapes=dict(shapes),
            own_kinds=dict(own_kinds or {}),
            memory=dict(memory or {}),
            state=copied,
        )
        self._pending = _PendingSave(commit, upload)

    def ready(self) -> bool:
        """Return whether a save is under way and this rank's part of it has ended, with or without an error."""
        return self._pending is not None and self._pending.upload.done()

    def wait_for_all(self, progress: Callable[[int], None]) -> None:
        """Wait until the upload of the save under way has ended on every rank. All ranks call this.

        The wait is a series of short collectives, none of which exceeds the process group's timeout. About once a
        second `progress` is called with the number of bytes that all ranks together have uploaded.
        """
        while True:
            self._wait_for_upload()
            mine = (self._pending is None or self.ready(), self.sent_bytes)
            ready, sent = zip(*gather_as(self._peers, _UPLOAD_STATE_TYPE, mine), strict=True)
            progress(sum(sent))
            if all(ready):
                return

    def _wait_for_upload(self) -> None:
        if self._pending is not None:
            wait([self._pending.upload], timeout=_PROGRESS_INTERVAL_S)

    def commit(self) -> SaveOutcome:
        """Finish the save under way. All ranks call this; it waits for ranks that are not ready.

        Raises:
            Superseded: a newer attempt has been claimed. All ranks raise it, and this attempt must end.
            CheckpointError: no save is under way.
        """
        if self._pending is None:
            raise CheckpointError("no save is under way", remedy="call `begin` before `commit`")
        pending, self._pending = self._pending, None
        answers = self._peers.gather_to_first(self._receipt_or_error(pending.upload))
        outcome = broadcast_or_raise(
            self._peers, lambda: pending.commit.decide_outcome(answers, self._clock()), SAVE_OUTCOME_TYPE
        )
        if isinstance(outcome, CommittedSave):
            self._last = outcome.step
        return outcome

    def close(self) -> None:
        """End the background thread. A save under way is abandoned."""
        self._worker.shutdown(wait=False, cancel_futures=True)

    def _upload(self, step: int, snapshot: Snapshot, blocked_s: float) -> RankReceipt:
        started = time.perf_counter()
        file = snapshot.hash_to_rank_file(CheckpointName(self._attempt.number, step).file_key(self._peers.rank))
        self._store.put_buffers(file.key, snapshot.buffers, self._record_sent_bytes)
        seconds = time.perf_counter() - started
        return RankReceipt(step=step, file=file, pieces=snapshot.pieces, blocked_s=blocked_s, background_s=seconds)

    def _record_sent_bytes(self, count: int) -> None:
        self._sent = count

    def _receipt_or_error(self, upload: "Future[RankReceipt]") -> JsonValue:
        error = upload.exception()
        if error is None:
            return upload.result().model_dump(mode="json")
        _log.error("rank %d could not save", self._peers.rank, exc_info=error)
        text = error.problem if isinstance(error, StoreError) else f"{type(error).__name__}: {error}"
        return {"error": f"rank {self._peers.rank}: {text}", "transient": isinstance(error, RETRYABLE_ERRORS)}
