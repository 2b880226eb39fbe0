"""Random batches with rows of mixed lengths, flat for us and padded for transformers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from encoder_core.batch import Batch

SPECIAL = 8  # ids below are special tokens, padding among them


def make_batch(
    lengths: list[int], vocab: int, *, share: float = 0.3, segments: bool = False, seed: int = 0
) -> Batch:
    """Rows of these lengths, about `share` of their tokens targets (one at least)."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    chosen = torch.rand(count, generator=generator) < share
    chosen[count // 2] = True
    targets = chosen.nonzero().flatten()
    starts = torch.cat([torch.full((length,), length // 2) for length in lengths])
    return Batch(
        tokens=torch.randint(SPECIAL, vocab, (count,), generator=generator),
        cu_seqlens=torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        max_length=max(lengths),
        positions=positions,
        target_positions=targets,
        target_ids=torch.randint(SPECIAL, vocab, (len(targets),), generator=generator),
        segments=(positions >= starts).long() if segments else None,
        pair_labels=torch.randint(2, (len(lengths),), generator=generator) if segments else None,
    )


@dataclass(frozen=True)
class Padded:
    """The same batch as rectangles [R, L]; `labels` are -100 off the targets."""

    input_ids: Tensor
    attention_mask: Tensor
    token_type_ids: Tensor
    labels: Tensor

    def flat(self, x: Tensor) -> Tensor:
        """[R, L, ...] to [T, ...], padding left out."""
        return x[self.attention_mask.bool()]


def pad(batch: Batch, pad_id: int) -> Padded:
    lengths = batch.cu_seqlens.diff().tolist()
    labels = torch.full_like(batch.tokens, -100)
    labels[batch.target_positions] = batch.target_ids
    segments = batch.segments if batch.segments is not None else torch.zeros_like(batch.tokens)

    def rectangle(x: Tensor, fill: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(x.split(lengths), batch_first=True, padding_value=fill)

    return Padded(
        rectangle(batch.tokens, pad_id),
        rectangle(torch.ones_like(batch.tokens), 0),
        rectangle(segments, 0),
        rectangle(labels, -100),
    )
