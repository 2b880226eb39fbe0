"""How ranks agree: everyone contributes a JSON value and everyone sees all of them. No pickle on the way."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from pydantic import JsonValue

from data_service.store.errors import StoreError


class Peers(Protocol):
    """The ranks of one training job. `all_gather` is a collective: all ranks call it, in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    def all_gather(self, value: JsonValue) -> list[JsonValue]:
        """Every rank's value, in rank order."""
        ...


@dataclass(frozen=True)
class Alone:
    """A job of one rank."""

    rank: int = 0
    world: int = 1

    def all_gather(self, value: JsonValue) -> list[JsonValue]:
        return [value]


class GlooPeers:
    """Ranks joined by a torch.distributed group that moves CPU tensors.

    Give checkpoints a group of their own (`new_group(backend="gloo")`): its collectives then mix with nobody
    else's. Its timeout bounds how long a rank waits for one that hangs, so it must be longer than the store's
    patience and the reading of a rank's share of a checkpoint.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def all_gather(self, value: JsonValue) -> list[JsonValue]:
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(lengths, torch.tensor([mine.numel()]), group=self._group)
        longest = int(max(lengths))
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: mine.numel()] = mine
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(texts, padded, group=self._group)
        return [
            json.loads(text[: int(length)].numpy().tobytes())
            for text, length in zip(texts, lengths, strict=True)
        ]


def gather_or_raise(peers: Peers, work: Callable[[], JsonValue]) -> list[JsonValue]:
    """What `work` returns on each rank; if the store fails on any of them, that error on all of them.

    Raises:
        StoreError: the first failing rank's.
    """
    try:
        mine: JsonValue = {"value": work()}
    except StoreError as error:
        mine = {"problem": error.problem, "remedy": error.remedy}
    values: list[JsonValue] = []
    for rank, answer in enumerate(peers.all_gather(mine)):
        match answer:
            case {"value": value}:
                values.append(value)
            case {"problem": str(problem), "remedy": str(remedy)}:
                raise StoreError(f"rank {rank}: {problem}", remedy=remedy)
            case _:
                raise TypeError(f"rank {rank} answered {answer!r}")
    return values
