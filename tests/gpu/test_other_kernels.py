"""The kernels beside attention (dropout, residual and norm; softmax and cross-entropy over the vocabulary): compared
with their formulas in fp64, repeated, and timed beside torch's operations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.gpu.machine import DEVICE, DTYPES, GPU, MAX_BIAS, MAX_ERROR, Figure, seconds_of
from tests.gpu.problems import error
from tests.support.models.kernel_formulas import (
    NormProblem,
    Outcome,
    losses_by_formula,
    losses_by_kernels,
    norm_problem,
    random_logits,
)

_WIDTHS = (64, 100, 768, 1024, 4096) if GPU else (40,)
_VOCABULARIES = (1000, 30_528, 50_304, 128_128, 250_112) if GPU else (100, 2500)
_REPEATS = 5 if GPU else 2


def _compare(compute: Callable[[], Outcome], exact: Outcome, dtype: torch.dtype) -> None:
    first = compute()
    off, biased = error(first, exact)
    assert off <= MAX_ERROR[dtype]
    assert biased <= MAX_BIAS[dtype]
    for _ in range(_REPEATS - 1):
        again = compute()
        assert all(torch.equal(again[name], x) for name, x in first.items())


@pytest.mark.parametrize("centered", [True, False], ids=["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("rate", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("width", _WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_equal_their_formula_and_repeat(dtype: str, width: int, rate: float, centered: bool) -> None:
    given = norm_problem(200 if GPU else 3, width, DTYPES[dtype], rate, centered=centered, device=DEVICE)
    exact = given.to(torch.float64).outcome(NormProblem.by_formula)
    _compare(lambda: given.outcome(NormProblem.by_kernel), exact, DTYPES[dtype])


def _logits(targets: int, vocabulary: int, dtype: torch.dtype, scale: float) -> tuple[Tensor, Tensor]:
    """Return random logits and targets; every target's two largest logits are equal, of which the first counts."""
    logits, ids = random_logits(targets, vocabulary, dtype, scale, vocabulary, DEVICE)
    logits[:, vocabulary // 2] = logits[:, vocabulary - 1] = logits.amax(1)
    ids[::2] = logits.argmax(-1)[::2]
    return logits, ids


@pytest.mark.parametrize("scale", [1.0, 30.0])
@pytest.mark.parametrize("vocabulary", _VOCABULARIES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_equal_their_formula_and_repeat(dtype: str, vocabulary: int, scale: float) -> None:
    logits, ids = _logits(150 if GPU else 3, vocabulary, DTYPES[dtype], scale)
    _compare(lambda: losses_by_kernels(logits, ids), losses_by_formula(logits.double(), ids), DTYPES[dtype])


def test_times_beside_torch(figure: Figure) -> None:
    dtype = torch.bfloat16 if GPU else torch.float32
    tokens, width = (32_768, 1024) if GPU else (2, 40)
    given = norm_problem(tokens, width, dtype, 0.1, centered=True, device=DEVICE)
    logits, ids = _logits(*((2048, 50_304) if GPU else (2, 2500)), dtype, 1.0)
    for what, step in {
        "norm: one kernel": lambda: given.outcome(NormProblem.by_kernel),
        "norm: torch": lambda: given.outcome(NormProblem.by_formula),
        "loss: two kernels and a copy": lambda: losses_by_kernels(logits, ids),
        "loss: torch in fp32": lambda: losses_by_formula(logits.float(), ids),
    }.items():
        figure(what, 1e3 * seconds_of(step), "ms")
