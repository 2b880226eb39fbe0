"""A matrix made orthogonal by products alone: the Newton-Schulz iteration of Muon.

Of M = U S V^T it gives about U V^T: singular values above 0.002 of M's Frobenius norm end between 0.68 and 1.21, which
serves as well as 1 would (Jordan et al. 2024, kellerjordan.github.io/posts/muon). Smaller ones end smaller.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from encoder_core.layers.parameters import Joined

STEPS = 5
_LINEAR, _CUBIC, _QUINTIC = (
    3.4445,
    -4.7750,
    2.0315,
)  # published: steep at 0, at the price of ending near 1 only
_TINY = 1e-7  # keeps a matrix of zeros zero


def working_dtype(device: torch.device) -> torch.dtype:
    """What the iteration computes in: bfloat16 on a GPU, as published, for its tensor cores; float32 on a CPU, on
    which ZeRO stages and topologies are compared to the last digits, and which may have no bfloat16 units."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def orthogonalise(matrix: Tensor) -> Tensor:
    """[rows, columns] of about U V^T, in the dtype of `matrix`, which stays as it is."""
    wide = matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix  # the smaller Gram matrix
    x = wide / (wide.norm() + _TINY)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_CUBIC, alpha=_QUINTIC), x, beta=_LINEAR)
    whole: Tensor = x.mT if wide is not matrix else x
    return whole


def rms_scale(rows: int, columns: int) -> float:
    """0.2 sqrt(max(rows, columns)): gives an orthogonal update the root mean square that AdamW's usually have, so that
    AdamW's learning rate and decay fit (Liu et al. 2025, arXiv 2502.16982, section 2.2)."""
    return 0.2 * math.sqrt(max(rows, columns))


def rows_and_columns(shape: Sequence[int]) -> tuple[int, int]:
    """The matrix that a parameter of two or more dimensions is: its first by the product of the others."""
    return shape[0], math.prod(shape[1:])


def parts_of(shape: Sequence[int], joined: Joined | None) -> list[tuple[int, int]]:
    """Rows and columns of every matrix in a parameter of this shape."""
    rows, columns = rows_and_columns(shape)
    return [(rows, columns)] if joined is None else [(joined.times * part, columns) for part in joined.rows]


def update_of(matrix: Tensor, joined: Joined | None = None) -> Tensor:
    """[rows, columns] of a momentum, as Muon applies it: orthogonal and scaled, if `joined` each matrix in it by
    itself. What is orthogonal together is something else: singular vectors of a whole mix its parts."""
    if joined is not None:
        return joined.join([update_of(part) for part in joined.split(matrix)])
    return orthogonalise(matrix) * rms_scale(*matrix.shape)


def flops(shape: tuple[int, int]) -> int:
    """Floating-point operations of `orthogonalise` for one matrix."""
    rows, columns = shape
    short, long = min(rows, columns), max(rows, columns)
    return STEPS * (4 * short * short * long + 2 * short**3)
