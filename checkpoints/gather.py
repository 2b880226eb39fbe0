"""Exchange of JSON values between ranks: from all to all, to rank 0, or from rank 0. Nothing is pickled."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor

from checkpoints.errors import CheckpointError, DamagedCheckpoint, NewerFormat
from data_service.store.errors import CredentialsExpired, StoreError, StoreUnavailable

GROUP_TIMEOUT = timedelta(days=1)
"""Timeout of the process group of a `GlooPeers`. It is long, because a collective may wait for the slowest rank's
upload or reading. If a rank dies, the collective ends at once; a rank that hangs is found by its missing heartbeats."""


class Peers(Protocol):
    """The ranks of one training job. Every exchange is a collective: all ranks call it, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def all_gather(self, value: JsonValue) -> list[JsonValue]:
        """Return every rank's value, in rank order. Meant for small values, because each rank receives all of them."""
        ...

    def gather_to_first(self, value: JsonValue) -> list[JsonValue]:
        """Return every rank's value, in rank order, on rank 0, and an empty list on the others."""
        ...

    def from_first(self, value: JsonValue) -> JsonValue:
        """Return rank 0's value on all ranks. The other ranks' values are ignored."""
        ...


@dataclass(frozen=True)
class Alone:
    """A job of one rank."""

    rank: int = 0
    world: int = 1

    def all_gather(self, value: JsonValue) -> list[JsonValue]:
        return [value]

    def gather_to_first(self, value: JsonValue) -> list[JsonValue]:
        return [value]

    def from_first(self, value: JsonValue) -> JsonValue:
        return value


class GlooPeers:
    """Ranks joined by a torch.distributed group that moves CPU tensors.

    Create a group for checkpoints alone (`new_group(backend="gloo", timeout=GROUP_TIMEOUT)`). Then its collectives
    neither mix with others nor time out because a rank is slow.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def all_gather(self, value: JsonValue) -> list[JsonValue]:
        mine = _text(value)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(lengths, torch.tensor([mine.numel()]), group=self._group)
        longest = int(max(lengths))
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(texts, _padded(mine, longest), group=self._group)
        return [_value(text[: int(length)]) for text, length in zip(texts, lengths, strict=True)]

    def gather_to_first(self, value: JsonValue) -> list[JsonValue]:
        mine = _text(value)
        longest = torch.tensor([mine.numel()])
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self._group)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        texts = [torch.empty(int(longest), dtype=torch.uint8) for _ in range(self.world)]
        first = self.rank == 0
        dist.gather(torch.tensor([mine.numel()]), lengths if first else None, group=self._group, group_dst=0)
        dist.gather(_padded(mine, int(longest)), texts if first else None, group=self._group, group_dst=0)
        return [_value(t[: int(length)]) for t, length in zip(texts, lengths, strict=True)] if first else []

    def from_first(self, value: JsonValue) -> JsonValue:
        mine = _text(value)
        length = torch.tensor([mine.numel()])
        dist.broadcast(length, group=self._group, group_src=0)
        text = mine if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(text, group=self._group, group_src=0)
        return _value(text)


def _text(value: JsonValue) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _value(text: Tensor) -> JsonValue:
    value: JsonValue = json.loads(text.numpy().tobytes())
    return value


def _padded(text: Tensor, length: int) -> Tensor:
    padded = torch.zeros(length, dtype=torch.uint8)
    padded[: text.numel()] = text
    return padded


def gather_or_raise(peers: Peers, work: Callable[[], JsonValue]) -> list[JsonValue]:
    """Call `work` on every rank; return all results, in rank order, on every rank.

    Raises:
        StoreError, CheckpointError: `work` raised it on some rank. All ranks raise the error of the first such rank.
    """
    return [_unwrapped(rank, answer) for rank, answer in enumerate(peers.all_gather(_wrapped(work)))]


def first_or_raise(peers: Peers, work: Callable[[], JsonValue]) -> JsonValue:
    """Call `work` on rank 0; return its result on all ranks. Raises as `gather_or_raise`."""
    return _unwrapped(0, peers.from_first(_wrapped(work) if peers.rank == 0 else None))


def _wrapped(work: Callable[[], JsonValue]) -> JsonValue:
    try:
        return {"value": work()}
    except (StoreError, CheckpointError) as error:
        return {"kind": _kind(error), "problem": error.problem, "remedy": error.remedy}


def _unwrapped(rank: int, answer: JsonValue) -> JsonValue:
    match answer:
        case {"value": value}:
            return value
        case {"kind": str(kind), "problem": str(problem), "remedy": str(remedy)}:
            raise _ERRORS[kind](f"rank {rank}: {problem}", remedy=remedy)
        case _:
            raise TypeError(f"rank {rank} sent an answer of an unknown form: {answer!r}")


_ERRORS = {
    "unavailable": StoreUnavailable,
    "expired": CredentialsExpired,
    "store": StoreError,
    "damaged": DamagedCheckpoint,
    "newer": NewerFormat,
    "checkpoint": CheckpointError,
}


def _kind(error: StoreError | CheckpointError) -> str:
    """Return the name in `_ERRORS` of the first class that fits, so that a caller knows whether to wait for a store."""
    return next(name for name, kind in _ERRORS.items() if isinstance(error, kind))
