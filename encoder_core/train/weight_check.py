"""Silent corruption: compares weights that must be the same on every rank.

A memory cell or a link that flips a bit raises no error; even the loss may not show it. Every rank adds up the bits
of its working weights, on the device, and all compare. The sums are of integers modulo 2**64, so the order of
addition does not matter and one flipped bit always changes them.

What the comparison finds depends on the ZeRO stage:

- Stage 0: weights stay from step to step, so damage is found at the next comparison, however late.
- Stages 1 and 2: every update rebuilds the working weights from the sharded master weights, so damage is found only
if they are compared before the next update. Master weights and moments exist once and cannot be compared.
- Stage 3: nothing exists twice, so nothing is found.

If a rank computes wrong results from good weights, it spoils the gradient of all ranks equally. No comparison of
weights finds that.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from encoder_core.train.exchange import RankGroup

_INTEGER_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_TWO_32 = 1 << 32

Digest = tuple[int, ...]


class CorruptReplica(Exception):
    """Weights differ between ranks. Discard everything computed from them: start again from the last commit.

    This is a hardware fault, not a user's mistake. All ranks raise the same error.

    Attributes:
        step: number of steps before the one in which it was found.
        ranks: ranks that deviate from the majority; empty if there is no majority, as with two ranks.
        tensor: name of the first weight that differs; None if an update has overwritten it since.
    """

    def __init__(self, step: int, ranks: tuple[int, ...], tensor: str | None) -> None:
        super().__init__(step, ranks, tensor)
        self.step, self.ranks, self.tensor = step, ranks, tensor

    def __str__(self) -> str:
        who = f"of rank {', '.join(map(str, self.ranks))}" if self.ranks else "of some rank, unknown which,"
        return f"the weights {who} were not what the others had at step {self.step} ({self.tensor or 'some'})"


@dataclass(frozen=True)
class ReplicatedWeights:
    """The weights that all ranks must hold alike; empty if nothing is replicated.

    Attributes:
        buffers: all weights, in as few tensors as possible.
        named: the same weights by parameter name, to locate a difference.
    """

    buffers: Sequence[Tensor] = ()
    named: Sequence[tuple[str, Tensor]] = ()

    def digest(self) -> Int64[Tensor, " 0_or_1"]:
        """Return one integer for all buffers, on their device; an empty tensor without buffers."""
        if not self.buffers:
            return torch.empty(0, dtype=torch.int64)
        sums = bit_sums(self.buffers)
        places = torch.arange(1, 2 * len(sums), 2, device=sums.device)  # odd factors keep every bit
        return (sums * places).sum()[None]


def bit_sums(tensors: Iterable[Tensor]) -> Int64[Tensor, " tensors"]:
    """Return the sum modulo 2**64 of each tensor's bits, read as integers. It stays on the tensors' device; nothing
    is copied.
    """
    return torch.stack([_sum_of_bits(tensor.detach().flatten()) for tensor in tensors])


def ensure_same_weights(replicated: ReplicatedWeights, control: RankGroup, step: int) -> None:
    """Compare the weights of all ranks. Collective.

    Raises:
        CorruptReplica: the bits of the weights differ between ranks; raised on all ranks.
    """
    if control.world > 1 and replicated.buffers:
        table = control.gather_rows(split_int64([replicated.digest()]))
        ensure_same_digests([join_int64(row) for row in table.tolist()], replicated, control, step)


def ensure_same_digests(
    digests: Sequence[Digest], replicated: ReplicatedWeights, control: RankGroup, step: int
) -> None:
    """Compare as `ensure_same_weights`, given the digests of all ranks. Collective only if they differ.

    Raises:
        CorruptReplica: the digests differ; raised on all ranks.
    """
    if len(set(digests)) > 1:
        raise CorruptReplica(step, deviating_ranks(digests), _first_difference(replicated, control))


def deviating_ranks(digests: Sequence[Digest]) -> tuple[int, ...]:
    """Return the ranks whose digest differs from that of more than half of all; empty if there is no such majority."""
    (common, count), *_ = Counter(digests).most_common(1)
    if 2 * count <= len(digests):
        return ()
    return tuple(rank for rank, digest in enumerate(digests) if digest != common)


def split_int64(digests: Sequence[Int64[Tensor, " n"]]) -> list[float]:
    """Return each 64-bit integer as two halves, because the gather carries float64."""
    values = torch.cat([digest.cpu() for digest in digests]).tolist() if digests else []
    return [half for value in values for half in divmod(value, _TWO_32)]


def join_int64(row: Sequence[float]) -> Digest:
    """Return one rank's halves as a digest to compare."""
    return tuple(int(half) for half in row)


def _first_difference(replicated: ReplicatedWeights, control: RankGroup) -> str | None:
    sums = bit_sums(tensor for _, tensor in replicated.named)
    table = control.gather_rows(split_int64([sums])).view(control.world, -1, 2)
    differs = (table != table[0]).any(dim=2).any(dim=0).tolist()
    return next((name for (name, _), other in zip(replicated.named, differs, strict=True) if other), None)


def _sum_of_bits(flat: Tensor) -> Int64[Tensor, ""]:
    """Sum eight bytes at a time where they lie on eight-byte boundaries, single elements at the ends."""
    per_word, integers = 8 // flat.element_size(), _INTEGER_DTYPES[flat.element_size()]
    head = min(flat.numel(), -flat.storage_offset() % per_word)
    stop = flat.numel() - (flat.numel() - head) % per_word
    pieces = ((flat[:head], integers), (flat[head:stop], torch.int64), (flat[stop:], integers))
    found = [piece.view(kind).sum(dtype=torch.int64) for piece, kind in pieces if piece.numel()]
    return sum(found[1:], start=found[0]) if found else torch.zeros((), dtype=torch.int64, device=flat.device)
