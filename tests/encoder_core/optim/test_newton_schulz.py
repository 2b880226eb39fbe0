"""What five Newton-Schulz steps make of a matrix, by its singular values."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from encoder_core.optim import muon
from encoder_core.optim.muon import flops, rms_scale, rows_and_columns, working_dtype

LEAST = 2e-3  # of the Frobenius norm: what becomes about 1
SIZES = st.integers(1, 20)


def orthogonalise(matrix: Tensor) -> Tensor:
    found = matrix.clone()
    muon.orthogonalise_each([(found, None)])
    return found / rms_scale(*found.shape)


def _matrix(rows: int, columns: int, seed: int) -> Tensor:
    """Float64, with singular values from 1 down to a hundredth."""
    torch.manual_seed(seed)
    short = min(rows, columns)
    left, right = (torch.linalg.qr(torch.randn(n, short, dtype=torch.float64))[0] for n in (rows, columns))
    return left * torch.logspace(-2, 0, short, dtype=torch.float64) @ right.T


@given(SIZES, SIZES, st.integers(0, 9), st.floats(1e-3, 1e6))
def test_directions_stay_and_all_become_about_as_long(rows: int, columns: int, seed: int, size: float) -> None:
    matrix = _matrix(rows, columns, seed)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    assert (values / values.norm() >= LEAST).all()
    found = orthogonalise(matrix * size)
    assert found.shape == matrix.shape
    lengths = left.T @ found @ right.T
    torch.testing.assert_close(lengths, torch.diag(lengths.diagonal()), rtol=0, atol=1e-9)
    assert (lengths.diagonal() > 0.68).all()
    assert (lengths.diagonal() < 1.21).all()


@given(SIZES, SIZES, st.integers(0, 9))
def test_the_transpose_becomes_the_transpose(rows: int, columns: int, seed: int) -> None:
    matrix = _matrix(rows, columns, seed)
    torch.testing.assert_close(orthogonalise(matrix.T), orthogonalise(matrix).T, rtol=0, atol=1e-9)


def test_zeros_stay_zeros() -> None:
    assert torch.equal(orthogonalise(torch.zeros(3, 5)), torch.zeros(3, 5))


def test_in_bfloat16_it_is_the_same_roughly() -> None:
    matrix = _matrix(48, 32, 1)
    rounded = orthogonalise(matrix.bfloat16())
    assert rounded.dtype == torch.bfloat16
    exact = orthogonalise(matrix)
    assert float((rounded.double() - exact).norm() / exact.norm()) < 0.05


def test_an_update_has_the_usual_size_of_adamws() -> None:
    """0.2 in the root mean square, for a matrix of any shape with all its singular values."""
    for rows, columns in ((64, 64), (256, 32), (16, 128)):
        update = rms_scale(rows, columns) * orthogonalise(_matrix(rows, columns, 3))
        assert float(update.square().mean().sqrt()) == pytest.approx(0.2, rel=0.2)


def test_what_it_costs_and_computes_in() -> None:
    assert rows_and_columns((6, 3, 2)) == (6, 6)
    assert flops((8, 4)) == flops((4, 8)) == 5 * (2 * 2 * 4 * 4 * 8 + 2 * 4**3)
    assert working_dtype(torch.device("cpu")) == torch.float32
    assert working_dtype(torch.device("cuda")) == torch.bfloat16
