"""LAMB unsharded against its formula. With DeepSpeed: test_whole_zero.py."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from encoder_core.optim.lamb import Lamb
from encoder_core.optim.settings import LambConfig
from encoder_core.optim.updates import set_update

STEPS = 10
SHAPES = [(13, 7), (50,), (4, 4)]


def _parameters() -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(2)
    return [nn.Parameter(torch.randn(shape, generator=draws)) for shape in SHAPES]


def _gradients() -> list[list[Tensor]]:
    draws = torch.Generator().manual_seed(1)
    return [[torch.randn(shape, generator=draws) for shape in SHAPES] for _ in range(STEPS)]


def _literal(w: Tensor, gradients: list[Tensor], *, scaled: bool, decay: float, corrected: bool) -> Tensor:
    """You et al. 2020, algorithm 2, in float64."""
    w, m, v = w.detach().double(), torch.zeros(w.shape).double(), torch.zeros(w.shape).double()
    for t, gradient in enumerate(gradients, start=1):
        g = gradient.double()
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        m_hat, v_hat = (m / (1 - 0.9**t), v / (1 - 0.999**t)) if corrected else (m, v)
        u = m_hat / (v_hat.sqrt() + 1e-6) + decay * w
        ratio = w.norm() / u.norm() if scaled else 1.0
        w = w - 0.01 * ratio * u
    return w


@pytest.mark.parametrize("corrected", [True, False])
def test_it_is_the_papers_algorithm(corrected: bool) -> None:
    params, gradients = _parameters(), _gradients()
    groups: list[dict[str, Any]] = [
        {"params": [params[0], params[2]]},
        {"params": [params[1]], "weight_decay": 0.0, "trust_ratio": False},
    ]
    expected = [
        _literal(p, [g[i] for g in gradients], scaled=i != 1, decay=0.0 if i == 1 else 0.1, corrected=corrected)
        for i, p in enumerate(params)
    ]
    optimizer = Lamb(groups, LambConfig(lr=0.01, weight_decay=0.1, bias_correction=corrected))
    for count in range(1, STEPS + 1):
        for p, g in zip(params, gradients[count - 1], strict=True):
            p.grad = g.clone()
        set_update(optimizer, lr=0.01, count=count)
        optimizer.step()
    for p, w in zip(params, expected, strict=True):
        torch.testing.assert_close(p.detach().double(), w, rtol=2e-6, atol=1e-7)


def test_a_parameter_of_zeros_moves_with_ratio_one() -> None:
    p = nn.Parameter(torch.zeros(4))
    p.grad = torch.ones(4)
    optimizer = Lamb([p], LambConfig(lr=0.01, bias_correction=True))
    set_update(optimizer, lr=0.01, count=1)
    optimizer.step()
    torch.testing.assert_close(p.detach(), torch.full((4,), -0.01), rtol=1e-4, atol=0)


def test_a_gradient_of_zeros_without_decay_moves_nothing() -> None:
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.zeros(4)
    optimizer = Lamb([p], LambConfig(lr=0.01, weight_decay=0.0))
    set_update(optimizer, lr=0.01, count=1)
    optimizer.step()
    assert torch.equal(p.detach(), torch.ones(4))
