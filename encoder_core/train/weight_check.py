"""Detects silent corruption by comparing weights that must be the same on every rank.

A memory cell or a link that flips a bit raises no error; even the loss may not show it. Every rank sums the bits of its
working weights on the device, and ranks compare the sums. Bits are summed as integers modulo 2**64, so the order of
addition does not matter, and a single flipped bit always changes the sum.

What the comparison finds depends on the ZeRO stage:

- Stage 0: weights persist from step to step, so the next comparison finds damage, however late.
- Stages 1 and 2: every update rebuilds the working weights from the sharded master weights, so damage is found only
if weights are compared before the next update. Master weights and moments have no second copy to compare with.
- Stage 3: no weight has a second copy, so nothing is found.

If a rank computes a wrong gradient from right weights, the gradient of all ranks is wrong in the same way, and no
comparison of weights finds it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from encoder_core.train.exchange import RankGroup

_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_TWO_32 = 1 << 32  # number of values of a 32-bit half

# The checksum of a rank's weights, as two 32-bit halves; empty if there is nothing to compare.
Digest = tuple[int, ...]


class CorruptReplica(Exception):
    """Weights differ between ranks. The run must restart from its last committed checkpoint.

    This is a hardware fault, not a user's mistake. All ranks raise the same error.

    Attributes:
        step: number of steps that had been taken when the difference was found.
        ranks: ranks that deviate from the majority; empty if there is no majority, as with two ranks.
        tensor: name of the first weight that differs; None if an update has overwritten it since.
    """

    def __init__(self, step: int, ranks: tuple[int, ...], tensor: str | None) -> None:
        super().__init__(step, ranks, tensor)
        self.step, self.ranks, self.tensor = step, ranks, tensor

    def __str__(self) -> str:
        who = f"of rank {', '.join(map(str, self.ranks))}" if self.ranks else "of an unknown rank"
        return f"the weights {who} differ from the other ranks' at step {self.step} ({self.tensor or 'unknown weight'})"


@dataclass(frozen=True)
class ReplicatedWeights:
    """The weights of which every rank has a copy; empty if all weights are sharded.

    Attributes:
        buffers: all weights, in as few tensors as possible.
        named: the same weights by parameter name, to locate a difference.
    """

    buffers: Sequence[Tensor] = ()
    named: Sequence[tuple[str, Tensor]] = ()

    def digest(self) -> Int64[Tensor, " 0_or_1"]:
        """Return the checksum of all buffers, one integer on their device; an empty tensor if there are no buffers."""
        if not self.buffers:
            return torch.empty(0, dtype=torch.int64)
        sums = bit_sums(self.buffers)
        factors = torch.arange(1, 2 * len(sums), 2, device=sums.device)  # odd: a product modulo 2**64 loses no bit
        return (sums * factors).sum()[None]


def bit_sums(tensors: Iterable[Tensor]) -> Int64[Tensor, " tensors"]:
    """Return for each tensor the sum modulo 2**64 of its bits, read as integers. All stays on the tensors' device."""
    return torch.stack([_sum_of_bits(tensor.detach().flatten()) for tensor in tensors])


def ensure_same_weights(replicated: ReplicatedWeights, control: RankGroup, step: int) -> None:
    """Compare the checksums of the weights of all ranks. Collective.

    Raises:
        CorruptReplica: the bits of the weights differ between ranks; raised on all ranks.
    """
    if control.world > 1 and replicated.buffers:
        table = control.gather_rows(split_int64([replicated.digest()]))
        ensure_same_digests([join_int64(row) for row in table.tolist()], replicated, control, step)


def ensure_same_digests(
    digests: Sequence[Digest], replicated: ReplicatedWeights, control: RankGroup, step: int
) -> None:
    """Compare the given digests of all ranks. Collective only if they differ.

    Raises:
        CorruptReplica: the digests differ; raised on all ranks.
    """
    if len(set(digests)) > 1:
        raise CorruptReplica(step, deviating_ranks(digests), _first_difference(replicated, control))


def deviating_ranks(digests: Sequence[Digest]) -> tuple[int, ...]:
    """Return the ranks whose digest differs from the majority's; empty if no digest has more than half of the ranks."""
    (common, count), *_ = Counter(digests).most_common(1)
    if 2 * count <= len(digests):
        return ()
    return tuple(rank for rank, digest in enumerate(digests) if digest != common)


def split_int64(digests: Sequence[Int64[Tensor, " n"]]) -> list[float]:
    """Split each 64-bit integer into two 32-bit halves, which are exact in the float64 rows that ranks gather."""
    values = torch.cat([digest.cpu() for digest in digests]).tolist() if digests else []
    return [half for value in values for half in divmod(value, _TWO_32)]


def join_int64(row: Sequence[float]) -> Digest:
    """Return the halves that a rank has gathered (`split_int64`) as integers. They serve as a digest as they are."""
    return tuple(int(half) for half in row)


def _first_difference(replicated: ReplicatedWeights, control: RankGroup) -> str | None:
    """Return the name of the first weight whose bits differ between ranks; None if all are equal. Collective."""
    sums = bit_sums(tensor for _, tensor in replicated.named)
    table = control.gather_rows(split_int64([sums])).view(control.world, -1, 2)
    differs = (table != table[0]).any(dim=2).any(dim=0).tolist()
    return next((name for (name, _), other in zip(replicated.named, differs, strict=True) if other), None)


def _sum_of_bits(flat: Tensor) -> Int64[Tensor, ""]:
    """Sum the tensor's bits as integers: aligned eight-byte words, and single elements before and after them."""
    per_word, integers = 8 // flat.element_size(), _INTEGER_DTYPES[flat.element_size()]
    head = min(flat.numel(), -flat.storage_offset() % per_word)
    stop = flat.numel() - (flat.numel() - head) % per_word
    pieces = ((flat[:head], integers), (flat[head:stop], torch.int64), (flat[stop:], integers))
    found = [piece.view(kind).sum(dtype=torch.int64) for piece, kind in pieces if piece.numel()]
    return sum(found[1:], start=found[0]) if found else torch.zeros((), dtype=torch.int64, device=flat.device)
