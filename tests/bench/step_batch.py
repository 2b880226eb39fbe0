"""The batch of `step.py`: random ids, flat for us and as padded rectangles for transformers."""

from dataclasses import dataclass, replace
from typing import Literal, assert_never

import torch
from torch import Tensor

from encoder_core.batch import Batch

Lengths = Literal["full", "mixed"]
"""Every row `length` long, or lengths spread evenly from an eighth of that to all of it."""

MASKED = 0.15
FIRST_ID = 8  # ids below are special tokens, padding among them
IGNORED = -100
LONGEST_SPAN = 10


def row_lengths(lengths: Lengths, rows: int, length: int) -> list[int]:
    """Tokens of each row; the longest has `length`."""
    match lengths:
        case "full":
            return [length] * rows
        case "mixed":
            return [length - (length - length // 8) * i // max(1, rows - 1) for i in range(rows)]
        case _:
            assert_never(lengths)


def make_batch(lengths: list[int], vocab: int, *, spans: bool = False) -> Batch:
    """Two segments and a pair label a row, 15 % of tokens targets: alone, or in spans of up to ten."""
    count = sum(lengths)
    positions = torch.cat([torch.arange(n) for n in lengths])
    second = torch.cat([torch.arange(n) >= n // 2 for n in lengths])
    targets = _spans(count) if spans else torch.randperm(count)[: round(MASKED * count)].sort().values
    return Batch(
        tokens=torch.randint(FIRST_ID, vocab, (count,)),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).int(),
        max_length=max(lengths),
        positions=positions,
        target_positions=targets,
        target_ids=torch.randint(FIRST_ID, vocab, (len(targets),)),
        segments=second.long(),
        pair_labels=torch.randint(2, (len(lengths),)),
    )


def _spans(count: int) -> Tensor:
    """Sorted places of evenly spread spans, 1 to `LONGEST_SPAN` tokens in turn."""
    mean = (1 + LONGEST_SPAN) / 2
    starts = range(1, count - LONGEST_SPAN, round(mean / MASKED))
    return torch.cat([start + torch.arange(1 + i % LONGEST_SPAN) for i, start in enumerate(starts)])


def in_random_order(batch: Batch) -> Batch:
    """The batch with a factorisation order: targets last, in an order drawn anew."""
    order = torch.zeros_like(batch.tokens)
    order[batch.target_positions] = 1 + torch.randperm(len(batch.target_positions))
    return replace(batch, order=order)


@dataclass(frozen=True)
class Rectangle:
    """The batch as transformers takes it, [R, L] each; `at` gives the rectangle's place of each flat token."""

    tokens: Tensor
    mask: Tensor
    segments: Tensor
    labels: Tensor
    at: Tensor

    @classmethod
    def of(cls, batch: Batch, pad_id: int) -> "Rectangle":
        row = torch.arange(batch.rows).repeat_interleave(batch.cu_seqlens.diff())
        at = row * batch.max_length + batch.positions
        labels = torch.full_like(batch.tokens, IGNORED)
        labels[batch.target_positions] = batch.target_ids

        def lay(x: Tensor, fill: int) -> Tensor:
            flat = torch.full((batch.rows * batch.max_length,), fill)
            return flat.index_copy(0, at, x).view(batch.rows, batch.max_length)

        segments = torch.zeros_like(batch.tokens) if batch.segments is None else batch.segments
        return cls(
            lay(batch.tokens, pad_id),
            lay(torch.ones_like(batch.tokens), 0),
            lay(segments, 0),
            lay(labels, IGNORED),
            at,
        )


@dataclass(frozen=True)
class Permuted:
    """What transformers' XLNet takes beside the rectangle.

    Attributes:
        hidden: [R, L, L] fp32, 1 where a token may not see another.
        mapping: [R, most targets of a row, L] fp32, one-hot.
        labels: [R, most targets of a row].
    """

    hidden: Tensor
    mapping: Tensor
    labels: Tensor

    @classmethod
    def of(cls, batch: Batch) -> "Permuted":
        """A target does not see its own token, and everything else sees what comes no later."""
        assert batch.order is not None
        rows = list(zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True))
        own = [(batch.target_positions >= a) & (batch.target_positions < b) for a, b in rows]
        most = max(int(chosen.sum()) for chosen in own)
        hidden = torch.zeros(batch.rows, batch.max_length, batch.max_length)
        mapping = torch.zeros(batch.rows, most, batch.max_length)
        labels = torch.full((batch.rows, most), IGNORED)
        for row, ((start, stop), chosen) in enumerate(zip(rows, own, strict=True)):
            order, at = batch.order[start:stop], batch.target_positions[chosen] - start
            sees = order.clone()
            sees[at] -= 1
            hidden[row, : stop - start, : stop - start] = (order[None, :] > sees[:, None]).float()
            mapping[row, torch.arange(len(at)), at] = 1.0
            labels[row, : len(at)] = batch.target_ids[chosen]
        return cls(hidden, mapping, labels)
