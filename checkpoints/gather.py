"""How ranks agree: JSON values to all, to the first rank, or from it. No pickle on the way."""

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
"""For the group of a `GlooPeers`: a collective may wait for the slowest rank's upload or reading, however long that
takes. A rank that dies ends it at once; one that hangs is found by the signs of life that it does not give."""


class Peers(Protocol):
    """The ranks of one training job. Every exchange is a collective: all ranks call it, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def all_gather(self, value: JsonValue) -> list[JsonValue]:
        """Every rank's value, in rank order. For small values: each rank receives them all."""
        ...

    def gather_to_first(self, value: JsonValue) -> list[JsonValue]:
        """On rank 0 every rank's value, in rank order; empty on the others."""
        ...

    def from_first(self, value: JsonValue) -> JsonValue:
        """Rank 0's value on all ranks; the others' values are ignored."""
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

    Give checkpoints a group of their own (`new_group(backend="gloo", timeout=GROUP_TIMEOUT)`): its collectives then
    do not mix with others, and do not time out on a rank that is only slow.
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
    """What `work` returns on each rank. If it raises one of the errors below on some rank, all ranks raise that error.

    Raises:
        StoreError, CheckpointError: the first failing rank's.
    """
    return [_unwrapped(rank, answer) for rank, answer in enumerate(peers.all_gather(_wrapped(work)))]


def first_or_raise(peers: Peers, work: Callable[[], JsonValue]) -> JsonValue:
    """Only rank 0 calls `work`; all ranks return what it returns. Raises as `gather_or_raise`."""
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
            raise TypeError(f"rank {rank} answered {answer!r}")


_ERRORS = {
    "unavailable": StoreUnavailable,
    "expired": CredentialsExpired,
    "store": StoreError,
    "damaged": DamagedCheckpoint,
    "newer": NewerFormat,
    "checkpoint": CheckpointError,
}


def _kind(error: StoreError | CheckpointError) -> str:
    """The first of the kinds above that fits the error, so that a caller can tell whether to wait for a store."""
    return next(name for name, kind in _ERRORS.items() if isinstance(error, kind))
