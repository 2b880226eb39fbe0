"""`Batch`: what a model sees. Flat tokens; only attention knows about rows."""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from encoder_core.random_draws import token_keys


@dataclass(frozen=True)
class Batch:
    """R rows, T tokens, M targets.

    Attributes:
        tokens: [T] int64 input ids, row after row.
        cu_seqlens: [R + 1] int32, row i is tokens[cu_seqlens[i]:cu_seqlens[i + 1]].
        max_length: longest row, in tokens.
        positions: [T] int64, index of each token inside its row, from 0.
        target_positions: [M] int64 flat indices to predict. M may be 0.
        target_ids: [M] int64 original ids there.
        segments: [T] int64, 0 for the first segment, 1 for the second and 2 for XLNet's classification token; None
            where the model has no token types.
        languages: [T] int64, the row of each token in the model's table of languages; None where rows have none.
        restarted: [T] int64, positions for a table of absolute positions where these are not `positions`: in a row of
            a sentence and its translation they begin again with the second. None elsewhere.
        pair_labels: [R] int64, or None.
        order: [T] int64, the factorisation order inside each row (permuted LM): a token's state may use tokens of
            no higher number, its prediction only those of lower number. None otherwise.
        reversed_rows: [R] bool, rows laid out from last token to first; None where there are none.
        numbers: [R] int64, of each row in the whole batch of its step: its draws belong to it. None: from 0.
        group: rows of one example, one after another (contrastive training: query, positive, negatives): example i has
            rows i * group to (i + 1) * group - 1.
        host: the same in the host's memory, where it was made; None where it was not moved (`to`).
    """

    tokens: Int[Tensor, " tokens"]
    cu_seqlens: Int[Tensor, " rows_plus_1"]
    max_length: int
    positions: Int[Tensor, " tokens"]
    target_positions: Int[Tensor, " targets"]
    target_ids: Int[Tensor, " targets"]
    segments: Int[Tensor, " tokens"] | None = None
    languages: Int[Tensor, " tokens"] | None = None
    restarted: Int[Tensor, " tokens"] | None = None
    pair_labels: Int[Tensor, " rows"] | None = None
    order: Int[Tensor, " tokens"] | None = None
    reversed_rows: Bool[Tensor, " rows"] | None = None
    numbers: Int[Tensor, " rows"] | None = None
    group: int = 1
    host: "Batch | None" = None

    def to(self, device: torch.device) -> "Batch":
        """On `device`, where it may arrive later than this returns; a GPU gets it out of pinned memory."""
        if self.tokens.device == device:
            return self
        return replace(self, host=self, **_each(self, lambda x: sent(x, device)))

    @property
    def on_host(self) -> "Batch":
        """What it was moved from. Where that is not known, and it lies on a device, this waits for the device."""
        return self.host or self.to(torch.device("cpu"))

    @property
    def rows(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def table_positions(self) -> Int[Tensor, " tokens"]:
        """What a table of absolute positions is asked for; distances between tokens follow from `positions`."""
        return self.positions if self.restarted is None else self.restarted

    @cached_property
    def keys(self) -> Int[Tensor, " tokens"]:
        """What each token's draws are hashed from (`draws.token_keys`)."""
        numbers = self.numbers
        if numbers is None:
            numbers = torch.arange(self.rows, device=self.tokens.device)
        return token_keys(numbers, self.cu_seqlens.diff(), self.positions)


def _each(batch: Batch, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    found = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return {name: change(value) for name, value in found.items() if isinstance(value, Tensor)}


def sent(x: Tensor, device: torch.device) -> Tensor:
    """`x` of the host on `device`, where it may arrive later than this returns: a GPU gets it out of pinned memory. Any
    other copy waits until the GPU has done all that it was given before."""
    pinned = x.pin_memory() if device.type == "cuda" and x.device.type == "cpu" else x
    return pinned.to(device, non_blocking=True)


def twice(batch: Batch) -> Batch:
    """Each row's text without masks, and once more after it as a row of its own: examples of two texts.

    The two have draws of their own: of row number n they are rows 2 n and 2 n + 1.
    """
    lengths_R = batch.cu_seqlens.diff().repeat_interleave(2)
    cu_seqlens = F.pad(lengths_R.cumsum(0), (1, 0)).to(batch.cu_seqlens.dtype)
    begins_R = batch.cu_seqlens[:-1].repeat_interleave(2)
    total = 2 * batch.tokens.numel()
    moved_T = (begins_R - cu_seqlens[:-1]).repeat_interleave(lengths_R, output_size=total)
    at_T = torch.arange(total, device=batch.tokens.device) + moved_T
    numbers_R = torch.arange(batch.rows, device=at_T.device) if batch.numbers is None else batch.numbers
    text_T = batch.tokens.index_copy(0, batch.target_positions, batch.target_ids)
    none = batch.target_ids[:0]
    return Batch(
        tokens=text_T[at_T],
        cu_seqlens=cu_seqlens,
        max_length=batch.max_length,
        positions=batch.positions[at_T],
        target_positions=none,
        target_ids=none,
        segments=_moved(batch.segments, at_T),
        languages=_moved(batch.languages, at_T),
        restarted=_moved(batch.restarted, at_T),
        numbers=torch.stack([2 * numbers_R, 2 * numbers_R + 1], 1).flatten(),
        group=2,
        host=None if batch.host is None else twice(batch.host),
    )


def _moved(of_T: Tensor | None, at_T: Tensor) -> Tensor | None:
    return None if of_T is None else of_T[at_T]
