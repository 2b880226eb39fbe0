"""The fused attention in bf16: its errors against fp64 are a small multiple of those of the formula with flash
attention's rounding.

Triton's interpreter keeps bf16 numbers as the 16 bits that they are, in NumPy's uint16. Up to Triton 3.7.1 its `dot`
hands these to NumPy as integers: 20.5 becomes 2.4e10. Its cast of fp32 to bf16 cuts bits off where GPUs round. With
`bf16_products` operands are made fp32, which holds every bf16 exactly, before they are multiplied and summed in fp32.
Casts then round to the nearest, ties to even.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from encoder_core.kernels.tiling import Tiling, Tilings
from tests.support.checks.gpu import interpreted
from tests.support.models.relative_attention import (
    DEVICE,
    Form,
    Problem,
    converted,
    expected,
    formula,
    fused,
    outcome,
    problem,
)


class InterpreterChanged(Exception):
    """Triton's interpreter is not the one that this file knows how to mend."""


def _widened(handle: Any, tl: Any, kind: type) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    if handle.data.dtype != np.uint16:
        raise InterpreterChanged(f"bf16 is kept as {handle.data.dtype}, not as uint16: see whether `dot` is right now")
    return kind((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


@contextmanager
def bf16_products() -> Iterator[None]:
    """While this lasts. Raises InterpreterChanged."""
    import triton.language as tl
    from triton.runtime import interpreter

    builder, kind = (
        getattr(interpreter, "InterpreterBuilder", None),
        getattr(interpreter, "TensorHandle", None),
    )
    given = getattr(builder, "create_dot", None)
    if given is None or kind is None:
        raise InterpreterChanged("triton.runtime.interpreter has no InterpreterBuilder.create_dot or no TensorHandle")

    def create_dot(self: Any, a: Any, b: Any, *others: Any) -> Any:
        return given(self, _widened(a, tl, kind), _widened(b, tl, kind), *others)

    cast = getattr(builder, "cast_impl", None)
    if cast is None:
        raise InterpreterChanged("triton.runtime.interpreter has no InterpreterBuilder.cast_impl")

    def cast_impl(self: Any, x: Any, to: Any) -> Any:
        if (x.dtype.scalar, to.scalar) == (tl.float32, tl.bfloat16):
            return kind(_rounded(x.data), tl.bfloat16)
        return cast(self, x, to)

    with patch.object(builder, "create_dot", create_dot), patch.object(builder, "cast_impl", cast_impl):
        yield


def _rounded(x: Any) -> Any:
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    near = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FC0), near)


pytest.importorskip("triton", reason="Triton is not installed")


FACTOR = 4.0  # times the formula's own error in bf16
ROUNDING = 2.0**-8
CUTS = Tilings(*[Tiling(32, 4, 1)] * 3)
FORMS = {
    "plain": Form(heads=1, width=16),
    "window": Form(heads=1, width=16, window=7),
    "disentangled": Form(heads=1, width=16, table_a=True, table_b=True),
    "with_positions": Form(heads=1, width=16, table_a=True, table_b=True, table_c=True),
    "few_queries": Form(heads=1, width=16, table_a=True, table_b=True, few=True),
    "relative_keys": Form(heads=1, width=16, table_a=True),
    "permuted": Form(heads=1, width=16, table_a=True, own_r=True, segments=True, order=True, signs=True, carried=6),
}
LENGTHS = [0, 1, 33, 130]
SCALES, RATES = (0.4, 300.0), (0.0, 0.1, 0.9)
SHORT = {("plain", 0.4, 0.1), ("window", 300.0, 0.0), ("disentangled", 0.4, 0.9), ("permuted", 0.4, 0.0)}


@pytest.fixture(autouse=True)
def products() -> Iterator[None]:
    with bf16_products() if DEVICE.type == "cpu" else nullcontext():
        yield


@triton.jit
def _dot_kernel(a: Any, b: Any, c: Any) -> None:
    i = tl.arange(0, 16)
    at = i[:, None] * 16 + i[None, :]
    tl.store(c + at, tl.dot(tl.load(a + at), tl.load(b + at)))


def test_products_are_those_of_rounded_operands_in_fp32() -> None:
    a, b = (torch.randn(16, 16, generator=torch.Generator().manual_seed(n)).bfloat16().to(DEVICE) for n in (1, 2))
    c = torch.empty(16, 16, device=DEVICE)
    _dot_kernel[(1,)](a, b, c)
    torch.testing.assert_close(c, a.float() @ b.float(), rtol=1e-5, atol=1e-5)


def in_bf16(given: Problem) -> dict[str, Tensor]:
    """The formula as flash attention rounds: inputs, probabilities and results in bf16, products and sums in fp32."""
    half = converted(given, torch.bfloat16)
    wide = Problem({name: x.float() for name, x in half.inputs.items()}, half.layout)
    context = formula(wide, rounded=True)
    return outcome(context.bfloat16(), half)


@pytest.mark.parametrize(
    ("name", "scale", "rate"),
    [
        pytest.param(*case, marks=() if case in SHORT else [pytest.mark.long, pytest.mark.timeout(1800)])
        for case in product(FORMS, SCALES, RATES)
    ],
)
def test_errors_are_those_of_bf16(name: str, scale: float, rate: float) -> None:
    lengths = [0, 1, 33] if (name, scale, rate) in SHORT else LENGTHS
    given = problem(lengths, replace(FORMS[name], dtype=torch.bfloat16, dropout=rate), scale=scale)
    exact, found, half = expected(given), fused(given, CUTS), in_bf16(given)
    for part, value in exact.items():
        size = float(value.norm())
        own = float((half[part].double() - value).norm())
        error = float((found[part].cpu().double() - value).norm())
        assert error <= FACTOR * max(own, ROUNDING * size), f"{part}: {error / max(size, 1e-9):.1e}"


@pytest.mark.parametrize(("told", "gpus", "means"), [(None, 0, "1"), (None, 2, "0"), ("1", 2, "1"), ("0", 0, "0")])
def test_kernels_are_interpreted_where_no_gpu_is_unless_told(told: str | None, gpus: int, means: str) -> None:
    assert interpreted({} if told is None else {"TRITON_INTERPRET": told}, gpus) == means
    assert DEVICE.type == ("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")
