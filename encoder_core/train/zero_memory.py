"""Memory on one GPU, in bytes: permanent memory (weights, gradients, optimizer) by ZeRO stage, and a microbatch's.

The permanent memory follows the allocations of DeepSpeed 0.19 (bf16_optimizer.py for bf16 at stage 1,
zero/stage_1_and_2.py, zero/stage3.py) as encoder_core/train/settings.py configures it: fp32 master weights, two
fp32 moments (one for Muon's matrices), gradients summed in fp32.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from encoder_core.train.settings import BUCKET_SIZE, Precision

Device = Literal["cuda", "cpu"]
"""Kind of device whose memory is counted."""

Stage = Literal[0, 1, 2, 3]
STAGES: tuple[Stage, ...] = (0, 1, 2, 3)

# Largest number of elements of gathered parameters that ZeRO 3 keeps for later use (DeepSpeed's default).
MAX_LIVE_ELEMENTS = 1_000_000_000


@dataclass(frozen=True)
class MemoryPart:
    """One item of the memory that a GPU needs: its name, its formula for display, and its bytes."""

    what: str
    formula: str
    bytes: int


def fixed_memory(
    parameters: int,
    ranks: int,
    stage: Stage,
    precision: Precision,
    reduce_dtype: Precision = "fp32",
    *,
    bucket: int = BUCKET_SIZE,
    one_moment: int = 0,
    largest: int = 0,
) -> list[MemoryPart]:
    """Return the permanent memory. bf16 at stage 0 is not supported (encoder_core/train/engine.py).

    Args:
        bucket: number of elements of a bucket that occupy memory. On a CPU, elements that are never written occupy
            only address space.
        one_moment: number of parameters that have one moment instead of two.
        largest: number of parameters in the largest tensor, which has its own bucket if it is larger than `bucket`.
    """
    if stage == 0:
        assert precision == "fp32"
        return _with_moments("weights, gradients", 8, parameters, ranks=1, one_moment=one_moment)
    if stage == 3:
        return [
            *_stage_3_memory(parameters, ranks, precision, one_moment=one_moment),
            *_buckets(1, precision, reduce_dtype, bucket, largest),
        ]
    state = 2 if precision == "bf16" else 4
    parts = [
        _sharded_part("weights", state, parameters, 1),
        *_with_moments("master weights", 4, parameters, ranks=ranks, one_moment=one_moment),
    ]
    if stage == 1 and precision == "bf16":
        return [
            *parts,
            _sharded_part("summed gradients, fp32, whole at stage 1", 4, parameters, 1),
        ]
    # In fp32, stage 1 keeps gradients in a bucket until they are reduced, as stage 2 does.
    return [
        *parts,
        _sharded_part("summed gradients, fp32", 4, parameters, ranks),
        *_buckets(2 if stage == 2 else 1, precision, reduce_dtype, bucket, largest),
    ]


def frozen_memory(parameters: int, precision: Precision) -> MemoryPart:
    """Return the memory of frozen networks: only weights, whole on every rank at every ZeRO stage."""
    return _sharded_part("weights of frozen networks", 2 if precision == "bf16" else 4, parameters, 1)


def average_memory(parameters: int, ranks: int, stage: Stage) -> MemoryPart:
    """Return the memory of an average of the weights, which is sharded like the master weights."""
    return _sharded_part("average of the weights, fp32", 4, parameters, ranks if stage else 1)


def _stage_3_memory(parameters: int, ranks: int, precision: Precision, *, one_moment: int) -> list[MemoryPart]:
    state = 2 if precision == "bf16" else 4
    return [
        _sharded_part("weights", state, parameters, ranks),
        _sharded_part("gathered weights, at most 1e9", state, min(parameters, MAX_LIVE_ELEMENTS), 1),
        *_with_moments("master weights", 4, parameters, ranks=ranks, one_moment=one_moment),
        _sharded_part("summed gradients, fp32", 4, parameters, ranks),
    ]


def _with_moments(what: str, bytes_each: int, parameters: int, *, ranks: int, one_moment: int) -> list[MemoryPart]:
    """Return the memory of `what` with `bytes_each` bytes per parameter, plus 4 bytes per parameter and moment."""
    parts = [_sharded_part(f"{what}, two moments", bytes_each + 8, parameters - one_moment, ranks)]
    if one_moment:
        parts.append(_sharded_part(f"{what}, momentum of hidden matrices", bytes_each + 4, one_moment, ranks))
    return parts


def _sharded_part(what: str, bytes_each: int, parameters: int, ranks: int) -> MemoryPart:
    share = f" / {ranks} ranks" if ranks > 1 else ""
    return MemoryPart(what, f"{bytes_each} B x {parameters:,}{share}", -(-bytes_each * parameters // ranks))


def _buckets(count: int, precision: Precision, reduce_dtype: Precision, size: int, largest: int) -> list[MemoryPart]:
    """Return the memory of `count` gradient buckets. With two, one is filled while the other is reduced."""
    state = 2 if precision == "bf16" else 4
    what = "bucket of gradients to reduce" if count == 1 else f"{count} buckets of gradients to reduce"
    parts = [MemoryPart(what, f"{count * state} B x {size:,}", count * state * size)]
    if precision == "bf16" and reduce_dtype == "fp32":
        added = max(size, largest)
        parts.append(MemoryPart("bucket of gradients in fp32, for the reduction", f"4 B x {added:,}", 4 * added))
    return parts


@dataclass(frozen=True)
class PassBytes:
    """The memory of one update group's forward and backward pass.

    Attributes:
        saved: bytes that autograd saves for the backward pass, without parameters.
        peak: largest number of bytes allocated at a time, without parameters and their gradients.
    """

    saved: int
    peak: int

    @property
    def transient_bytes(self) -> int:
        """Bytes at the peak besides those that autograd saves: logits, gradients of states, a recomputed layer."""
        return self.peak - self.saved


@dataclass(frozen=True)
class MicrobatchMemory:
    """The peak memory of a microbatch with any number of rows, interpolated from three counted numbers of rows.

    Attributes:
        rows: the counted numbers of rows: the smallest, twice the smallest, and the largest.
        groups: memory of each update group of a step, for each counted number of rows.
    """

    rows: tuple[int, int, int]
    groups: Sequence[tuple[PassBytes, PassBytes, PassBytes]]

    def parts(self, rows: int) -> list[MemoryPart]:
        """Return the memory of a microbatch of `rows` rows."""
        return max((self._group_parts(group, rows) for group in self.groups), key=total_bytes)

    def _group_parts(self, counts: tuple[PassBytes, PassBytes, PassBytes], rows: int) -> list[MemoryPart]:
        """Return the memory of one update group.

        Saved bytes are linear in the rows. Transient bytes grow only up to a limit, because the head works on chunks of
        logits.
        """
        first, second, last = self.rows
        few, twice, many = counts
        saved = _interpolate(first, few.saved, last, many.saved, rows)
        growing = _interpolate(first, few.transient_bytes, second, twice.transient_bytes, rows)
        least = _interpolate(first, few.transient_bytes, last, many.transient_bytes, rows)
        return [
            MemoryPart("activations", "what autograd keeps, counted", saved),
            MemoryPart("temporary tensors, at most", "counted", max(least, min(growing, many.transient_bytes))),
        ]


def _interpolate(x0: int, y0: int, x1: int, y1: int, x: int) -> int:
    """Return y at `x` on the line through (x0, y0) and (x1, y1)."""
    return y1 if x0 == x1 else y0 + (y1 - y0) * (x - x0) // (x1 - x0)


def total_bytes(parts: Iterable[MemoryPart]) -> int:
    return sum(part.bytes for part in parts)
