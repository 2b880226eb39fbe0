"""The batch of `step.py`: random ids."""

from dataclasses import replace
from typing import Literal, assert_never

import torch
from torch import Tensor

from encoder_core.batch import Batch

Lengths = Literal["full", "mixed"]
"""Every row `length` long, or lengths spread evenly from an eighth of that to all of it."""

MASKED = 0.15
FIRST_ID = 8  # ids below are special tokens, padding among them
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
