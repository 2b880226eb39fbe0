"""Loss, accuracy and gradient of logits by the kernels, under Triton's interpreter, against the formula in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from encoder_core.kernels import softmax_loss
from encoder_core.kernels.softmax_loss import overwrite_with_gradient, softmax_sums

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 2e-6,
}  # of losses and of the bias, which are never rounded to less
ROUNDED = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-7}
"""Of the gradient, which is at most 1. The interpreter does not round to bf16, it cuts; the chip rounds
(`test_compiled.py`)."""


def by_kernels(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Losses, what is correct, gradients by logits and by bias."""
    sums, gradient = softmax_sums(logits, ids), logits.clone()
    by_bias = overwrite_with_gradient(gradient, ids, sums, biased=True)
    assert by_bias is not None
    return sums.losses, sums.correct, gradient, by_bias


def by_formula(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    log_p = logits.double().log_softmax(-1)
    gradient = log_p.exp() - torch.nn.functional.one_hot(ids, logits.shape[1])
    return -log_p.gather(1, ids[:, None])[:, 0], logits.argmax(-1) == ids, gradient, gradient.sum(0)


def drawn(targets: int, vocab: int, dtype: torch.dtype, scale: float, seed: int) -> tuple[Tensor, Tensor]:
    """Every second target is the largest logit."""
    draws = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(targets, vocab, generator=draws, dtype=torch.float64)).to(dtype)
    ids = torch.randint(vocab, (targets,), generator=draws)
    ids[::2] = logits.argmax(-1)[::2]
    return logits, ids


def hold(logits: Tensor, ids: Tensor) -> None:
    dtype = logits.dtype
    losses, correct, gradient, by_bias = by_kernels(logits, ids)
    wanted = by_formula(logits, ids)
    wide = torch.promote_types(dtype, torch.float32)
    assert (losses.dtype, by_bias.dtype, gradient.dtype) == (wide, wide, dtype)
    most = TOLERANCES[wide]
    torch.testing.assert_close(losses.double(), wanted[0], rtol=most, atol=most)
    assert torch.equal(correct, wanted[1])
    off = ROUNDED.get(dtype, most)
    # A target's gradient is p - 1: where p is nearly 1, what is left of it is the rounding of p, in fp32.
    torch.testing.assert_close(gradient.double(), wanted[2], rtol=off, atol=off / 2**10 + 2.0**-22)
    torch.testing.assert_close(by_bias.double(), wanted[3], rtol=most, atol=8 * most)


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
        hold(*drawn(targets, vocab, dtype, scale, seed))


@pytest.mark.parametrize("vocab", [2049, 30_522])
def test_equals_the_formula_in_the_tiles_that_are_used(vocab: int) -> None:
    for dtype in (torch.float32, torch.float16):
        hold(*drawn(1, vocab, dtype, 4.0, vocab))


@pytest.mark.long
def test_equals_the_formula_of_the_largest_vocabularies() -> None:
    for vocab in (128_128, 250_112):
        for dtype in DTYPES:
            hold(*drawn(3, vocab, dtype, 4.0, vocab))


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
    losses, _, gradient, by_bias = by_kernels(logits, ids)
    wanted = by_formula(logits, ids)
    assert not losses[1:3].isfinite().any()
    torch.testing.assert_close(losses.double(), wanted[0], equal_nan=True, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient.double(), wanted[2], equal_nan=True, rtol=1e-5, atol=1e-6)
    assert by_bias.isnan().all()


def test_an_id_outside_of_the_vocabulary_is_no_loss() -> None:
    losses = softmax_sums(torch.randn(3, 50), torch.tensor([50, -1, 49])).losses
    assert losses.isnan().tolist() == [True, True, False]


@given(st.sampled_from([torch.float32, torch.float16]), st.integers(0, 2**31))
@settings(max_examples=2)
def test_a_gradient_in_half_precision_is_that_in_fp32_rounded_once(dtype: torch.dtype, seed: int) -> None:
    """And the bias has what was not rounded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(softmax_loss, "_COLUMNS", 64)
        logits, ids = drawn(3, 150, dtype, 3.0, seed)
        losses, correct, gradient, by_bias = by_kernels(logits, ids)
        wide = by_kernels(logits.float(), ids)
    assert torch.equal(losses, wide[0])
    assert torch.equal(correct, wide[1])
    assert torch.equal(gradient, wide[2].to(dtype))
    assert torch.equal(by_bias, wide[3])
