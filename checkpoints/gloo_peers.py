"""`Peers` over torch.distributed. The protocol is in `checkpoints.gather`, so that a process of one rank, such as
the driver, reads checkpoints without importing torch.
"""

import json
from datetime import timedelta

import torch
import torch.distributed as dist
from pydantic import JsonValue
from torch import Tensor

GROUP_TIMEOUT = timedelta(days=1)
"""Timeout of the process group of a `GlooPeers`. It is long, because a collective may wait for the slowest rank's
upload or reading. If a rank dies, the collective ends at once; a rank that hangs is found by its missing heartbeats."""


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
        mine = _encode(value)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        dist.all_gather(lengths, torch.tensor([mine.numel()]), group=self._group)
        longest = int(max(lengths))
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.world)]
        dist.all_gather(texts, _pad(mine, longest), group=self._group)
        return [_decode(text[: int(length)]) for text, length in zip(texts, lengths, strict=True)]

    def gather_to_first(self, value: JsonValue) -> list[JsonValue]:
        mine = _encode(value)
        longest = torch.tensor([mine.numel()])
        dist.all_reduce(longest, dist.ReduceOp.MAX, group=self._group)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
        texts = [torch.empty(int(longest), dtype=torch.uint8) for _ in range(self.world)]
        first = self.rank == 0
        dist.gather(torch.tensor([mine.numel()]), lengths if first else None, group=self._group, group_dst=0)
        dist.gather(_pad(mine, int(longest)), texts if first else None, group=self._group, group_dst=0)
        return [_decode(t[: int(length)]) for t, length in zip(texts, lengths, strict=True)] if first else []

    def broadcast(self, value: JsonValue) -> JsonValue:
        mine = _encode(value)
        length = torch.tensor([mine.numel()])
        dist.broadcast(length, group=self._group, group_src=0)
        text = mine if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(text, group=self._group, group_src=0)
        return _decode(text)


def _encode(value: JsonValue) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _decode(text: Tensor) -> JsonValue:
    value: JsonValue = json.loads(text.numpy().tobytes())
    return value


def _pad(text: Tensor, length: int) -> Tensor:
    padded = torch.zeros(length, dtype=torch.uint8)
    padded[: text.numel()] = text
    return padded
