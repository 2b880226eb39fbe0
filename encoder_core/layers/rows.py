"""Rows of flat tokens: conversion to a padded rectangle and back, and rotary positions.

Rotary positions (Su et al., 2021, RoFormer) rotate queries and keys by angles proportional to their position. Element
i of the first half of a head and element i of its second half form a pair, which is rotated by position * base^(-2 i /
D). So the product of a rotated query and a rotated key depends only on their distance. Angles are computed in fp32 for
any precision of the model, as in the published models, because their weights were trained with fp32's errors: up to
2.4e-4 at position 8,191.

Shapes: T tokens of all rows, R rows, L the longest row, N heads, D head width.
"""

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.random_draws import token_keys


class Rotation(NamedTuple):
    """Cosine and sine of each token's angles, in fp32, shaped to broadcast over heads."""

    cos: Float[Tensor, "tokens 1 half_width"]
    sin: Float[Tensor, "tokens 1 half_width"]


def rotation(positions_T: Int[Tensor, " tokens"], base: float, width: int) -> Rotation:
    """Return the rotation of heads of an even `width` at these positions."""
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device=positions_T.device) / width
    angles_T1D = positions_T[:, None, None].float() * (1.0 / base**exponent)
    return Rotation(angles_T1D.cos(), angles_T1D.sin())


def rotate(x_TND: Float[Tensor, "tokens heads width"], angles: Rotation) -> Float[Tensor, "tokens heads width"]:
    """Rotate each pair of `x_TND` by its angle. Computed in fp32 or wider, returned in the dtype of `x_TND`."""
    first, second = x_TND.chunk(2, -1)
    turned = torch.cat((first * angles.cos - second * angles.sin, second * angles.cos + first * angles.sin), -1)
    return turned.to(x_TND.dtype)


@dataclass(frozen=True)
class Rows:
    """The rows of one batch. Derived tensors are computed at most once and shared by all layers.

    Attributes:
        cu_seqlens: [R + 1] int32, row i is tokens[cu_seqlens[i]:cu_seqlens[i + 1]].
        positions: [T] int64, index of each token inside its row.
        max_length: L, number of tokens in the longest row.
        batch: the batch with these tokens, whose row numbers random draws need; None: rows are numbered from 0.
        at: [T] int64, flat indices of these tokens in the batch; None: the rows have all of the batch's tokens.
        causal: whether a token sees no later token of its row.
    """

    cu_seqlens: Int[Tensor, " rows_plus_1"]
    positions: Int[Tensor, " tokens"]
    max_length: int
    batch: Batch | None = None
    at: Int[Tensor, " tokens"] | None = None
    causal: bool = False

    @classmethod
    def from_batch(cls, batch: Batch) -> "Rows":
        return cls(batch.cu_seqlens, batch.positions, batch.max_length, batch, causal=batch.causal)

    @cached_property
    def random_keys(self) -> Int[Tensor, " tokens"]:
        """Key of each token, from which its random draws are hashed (`random_draws.token_keys`)."""
        if self.batch is None:
            numbers = torch.arange(self.row_count, device=self.positions.device)
            return token_keys(numbers, self.cu_seqlens.diff(), self.positions)
        return self.batch.random_keys if self.at is None else self.batch.random_keys.index_select(0, self.at)

    @property
    def row_count(self) -> int:
        return self.cu_seqlens.numel() - 1

    @property
    def is_full(self) -> bool:
        """Whether all rows have L tokens, so that flat and padded tokens are the same array."""
        return self.positions.numel() == self.row_count * self.max_length

    @cached_property
    def bounds(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of each row, as Python integers. Waits for the GPU if the batch is on one."""
        edges = self.cu_seqlens.tolist()
        return tuple(itertools.pairwise(edges))

    @cached_property
    def padded_indices(self) -> Int[Tensor, " tokens"]:
        """[T] int64, index of each token in the flattened padded rectangle."""
        lengths = self.cu_seqlens.diff()
        row = torch.arange(self.row_count, device=lengths.device)
        owner = row.repeat_interleave(lengths, output_size=self.positions.numel())
        return owner * self.max_length + self.positions

    @cached_property
    def mask(self) -> Bool[Tensor, "rows 1 1 longest"] | None:
        """True for tokens of the rectangle, false for padding; broadcasts over heads and queries. None if `is_full`."""
        if self.is_full:
            return None
        column = torch.arange(self.max_length, device=self.cu_seqlens.device)
        return (column < self.cu_seqlens.diff()[:, None])[:, None, None, :]

    def exceeds_window(self, window: int | None) -> bool:
        """Return whether the longest row has tokens that are more than `window` tokens apart (`attention.py`)."""
        return window is not None and self.max_length > window + 1

    def mask_within(self, window: int | None) -> Bool[Tensor, "rows 1 queries longest"] | None:
        """Return `mask`, restricted to the keys in the query's window and, in causal rows, to keys that are not later.

        Queries that are padding see the whole row, so that every query sees a key.
        """
        if not self.causal and not self.exceeds_window(window):
            return self.mask
        at_L = torch.arange(self.max_length, device=self.cu_seqlens.device)
        ahead_LL = at_L[:, None] - at_L  # position of the query minus position of the key
        seen_LL = ahead_LL >= 0 if self.causal else torch.ones_like(ahead_LL, dtype=torch.bool)
        if window is not None:
            seen_LL &= ahead_LL.abs() <= window
        if self.mask is None:
            return seen_LL[None, None]
        return self.mask & (seen_LL | ~self.mask.transpose(-1, -2))

    def rotation(self, base: float, width: int) -> Rotation:
        """Return the rotation of these rows' tokens for `rotate`, computed once for each base and width."""
        key = (base, width)
        if key not in self._rotations:
            self._rotations[key] = rotation(self.positions, base, width)
        return self._rotations[key]

    @cached_property
    def _rotations(self) -> dict[tuple[float, int], Rotation]:
        return {}

    def pad(self, x: Shaped[Tensor, "tokens ..."]) -> Shaped[Tensor, "rows longest ..."]:
        """Copy flat tokens to a rectangle, with zeros after the end of a row."""
        shape = (self.row_count, self.max_length, *x.shape[1:])
        if self.is_full:
            return x.view(shape)
        flat = x.new_zeros((self.row_count * self.max_length, *x.shape[1:]))
        return flat.index_copy(0, self.padded_indices, x).view(shape)

    def unpad(self, x: Shaped[Tensor, "rows longest ..."]) -> Shaped[Tensor, "tokens ..."]:
        """Return the flat tokens of a rectangle; the inverse of `pad`."""
        flat = x.reshape(self.row_count * self.max_length, *x.shape[2:])
        return flat if self.is_full else flat.index_select(0, self.padded_indices)


def repeat_shared_heads(q_TND: Tensor, k_TND: Tensor, v_TND: Tensor) -> tuple[Tensor, Tensor]:
    """Repeat keys and values for the query heads that share them. If no heads are shared, return them unchanged."""
    shared = q_TND.shape[1] // k_TND.shape[1]
    if shared == 1:
        return k_TND, v_TND
    return k_TND.repeat_interleave(shared, 1), v_TND.repeat_interleave(shared, 1)
