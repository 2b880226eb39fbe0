"""The chunked cross-entropy against torch's own on all logits at once."""

import pytest
import torch
import torch.nn.functional as F

from encoder_core.heads import cross_entropy
from encoder_core.heads.cross_entropy import linear_cross_entropy


def inputs(targets: int, dtype: torch.dtype = torch.float64) -> tuple[list[torch.Tensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    shapes = [(targets, 6), (13, 6), (13,)]
    tensors = [torch.randn(s, generator=generator, dtype=dtype, requires_grad=True) for s in shapes]
    return tensors, torch.randint(13, (targets,), generator=generator)


@pytest.mark.parametrize("chunk", [1, 13 * 4, 2**24])
@pytest.mark.parametrize("targets", [1, 4, 11])
def test_equals_the_formula(chunk: int, targets: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK", chunk)
    tensors, ids = inputs(targets)
    features, weight, bias = tensors
    logits = F.linear(features, weight, bias)
    expected = F.cross_entropy(logits, ids, reduction="sum")
    loss_sum, correct = linear_cross_entropy(features, weight, bias, ids)
    torch.testing.assert_close(loss_sum, expected, rtol=1e-12, atol=0)
    assert correct == (logits.argmax(-1) == ids).sum()
    actual = torch.autograd.grad(loss_sum * 0.37, tensors)
    for grad, wanted in zip(actual, torch.autograd.grad(expected * 0.37, tensors), strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-11, atol=1e-13)


def test_no_targets_give_zero_and_zero_gradients() -> None:
    tensors, ids = inputs(0)
    loss_sum, correct = linear_cross_entropy(*tensors, ids)
    assert loss_sum == 0
    assert correct == 0
    for tensor, grad in zip(tensors, torch.autograd.grad(loss_sum, tensors), strict=True):
        assert grad.shape == tensor.shape
        assert not grad.any()


def test_bf16_sums_in_fp32() -> None:
    tensors, ids = inputs(2000, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    loss_sum, _ = linear_cross_entropy(*tensors, ids)
    expected = F.cross_entropy(F.linear(exact[0], exact[1], exact[2]), ids, reduction="sum")
    assert loss_sum.dtype == torch.float32
    assert loss_sum.item() == pytest.approx(expected.item(), rel=2e-3)
    for grad, wanted in zip(
        torch.autograd.grad(loss_sum, tensors), torch.autograd.grad(expected, exact), strict=True
    ):
        assert grad.dtype == torch.bfloat16
        assert (grad.double() - wanted).norm() / wanted.norm() < 0.02


def test_holds_one_chunk_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK", 13 * 2)
    tensors, ids = inputs(50)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        linear_cross_entropy(*tensors, ids)
    assert sum(saved) == sum(tensor.numel() for tensor in tensors)
