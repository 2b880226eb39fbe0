"""Loss, accuracy and gradient of logits by the kernels, under Triton's interpreter, against the formula in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from encoder_core.kernels import softmax_loss
from encoder_core.kernels.softmax_loss import softmax_sums
from tests.support.models.kernel_formulas import losses_by_formula, losses_by_kernels, random_logits

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
}  # of losses and of the bias, which are never rounded to less
ROUNDED = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
"""Of the gradient, which is at most 1. The interpreter does not round to bf16, it cuts; the chip rounds
(`test_compiled.py`)."""


def hold(logits: Tensor, ids: Tensor) -> None:
    dtype = logits.dtype
    found, wanted = losses_by_kernels(logits, ids), losses_by_formula(logits.double(), ids)
    wide = torch.promote_types(dtype, torch.float32)
    assert (found["loss"].dtype, found["by bias"].dtype, found["gradient"].dtype) == (wide, wide, dtype)
    most = TOLERANCES[wide]
    torch.testing.assert_close(found["loss"].double(), wanted["loss"], rtol=most, atol=most)
    assert torch.equal(found["correct"], wanted["correct"])
    off = ROUNDED.get(dtype, most)
    # A target's gradient is p - 1: where p is nearly 1, what is left of it is the rounding of p, in fp32.
    torch.testing.assert_close(found["gradient"].double(), wanted["gradient"], rtol=off, atol=off / 2**10 + 2.0**-22)
    torch.testing.assert_close(found["by bias"].double(), wanted["by bias"], rtol=most, atol=8 * most)


@settings(max_examples=8)
@given(
    targets=st.integers(0, 4),
    vocab=st.one_of(st.integers(1, 200), st.integers(1, 4).map(lambda tiles: 64 * tiles)),
    dtype=st.sampled_from(DTYPES),
    scale=st.sampled_from([0.1, 3.0, 300.0]),
    per_program=st.integers(1, 4),
    seed=st.integers(0, 2**31),
)
def test_equals_the_formula(
    targets: int, vocab: int, dtype: torch.dtype, scale: float, per_program: int, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax_loss, "_COLUMNS", 64)
        patch.setattr(softmax_loss, "_TARGETS_PER_PROGRAM", per_program)
        hold(*random_logits(targets, vocab, dtype, scale, seed))


@pytest.mark.parametrize("vocab", [2049, 30_522])
def test_equals_the_formula_in_the_tiles_that_are_used(vocab: int) -> None:
    for dtype in (torch.float32, torch.float16):
        hold(*random_logits(1, vocab, dtype, 4.0, vocab))


@pytest.mark.long
def test_equals_the_formula_of_the_largest_vocabularies() -> None:
    for vocab in (128_128, 250_112):
        for dtype in DTYPES:
            hold(*random_logits(3, vocab, dtype, 4.0, vocab))


def test_the_first_of_equal_logits_is_the_prediction() -> None:
    vocab = 3 * softmax_loss._COLUMNS
    logits = torch.zeros(6, vocab)
    for row, places in enumerate([(5, 9), (9, vocab - 1), (2050, 4099), (0, 2048), (7, 2055)]):
        logits[row, list(places)] = 2.0
    first = logits.argmax(-1)
    assert first.tolist() == [5, 9, 2050, 0, 7, 0]
    assert softmax_sums(logits, first).correct.all()
    later = torch.tensor([9, vocab - 1, 4099, 2048, 2055, 1])
    assert not softmax_sums(logits, later).correct.any()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 199])
def test_numbers_that_are_not_finite_come_out_as_of_torch(
    bad: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(softmax_loss, "_COLUMNS", 64)
    logits = torch.randn(4, 200)
    logits[1, place] = logits[2, :] = bad
    ids = torch.tensor([place, place, 3, 3])
    found, wanted = losses_by_kernels(logits, ids), losses_by_formula(logits.double(), ids)
    assert not found["loss"][1:3].isfinite().any()
    for name, off in (("loss", 1e-5), ("gradient", 1e-6)):
        torch.testing.assert_close(found[name].double(), wanted[name], equal_nan=True, rtol=1e-5, atol=off)
    assert found["by bias"].isnan().all()


def test_an_id_outside_of_the_vocabulary_is_no_loss() -> None:
    losses = softmax_sums(torch.randn(3, 50), torch.tensor([50, -1, 49])).losses
    assert losses.isnan().tolist() == [True, True, False]


@given(st.sampled_from([torch.float32, torch.float16]), st.integers(0, 2**31))
@settings(max_examples=2)
def test_a_gradient_in_half_precision_is_that_in_fp32_rounded_once(dtype: torch.dtype, seed: int) -> None:
    """And the bias has what was not rounded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax_loss, "_COLUMNS", 64)
        logits, ids = random_logits(3, 150, dtype, 3.0, seed)
        found, wide = losses_by_kernels(logits, ids), losses_by_kernels(logits.float(), ids)
    for name, x in found.items():
        assert torch.equal(x, wide[name].to(x.dtype)), name
