"""One rank's part of a checkpoint, copied out of the trainer's way: a safetensors file laid out in memory.

Fragments are copied straight to their places in the file's body, so the copy is the only one: hashing and
uploading read from it. The body is kept from one save to the next: fresh pages cost more than the copy.
The format is 8 bytes of header length, a JSON header, then the tensors
(https://github.com/huggingface/safetensors#format).
"""

import json
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor

from checkpoints.errors import CheckpointError
from checkpoints.layout import CHUNK, ITEM, File, StoredRange
from data_service.store.base import chunk_digests
from encoder_core.train.zero_state import Fragment


@dataclass(frozen=True)
class Snapshot:
    """A file's bytes and what is where in them.

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
    """Copies the fragments into one file's layout, into the body `reuse` of an earlier snapshot if it fits.

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
