"""AdamW against torch's, and without bias correction against BERT's update written out."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from encoder_core.errors import TrainingError
from encoder_core.optim.adamw import AdamW
from encoder_core.optim.settings import AdamWConfig
from encoder_core.optim.updates import set_update

STEPS = 20


def _gradients(shapes: list[tuple[int, ...]], seed: int = 1) -> list[list[Tensor]]:
    draws = torch.Generator().manual_seed(seed)
    return [[torch.randn(shape, generator=draws) * 0.1 for shape in shapes] for _ in range(STEPS)]


def _parameters(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(2)
    return [nn.Parameter(torch.randn(shape, generator=draws)) for shape in shapes]


def _rates() -> list[float]:
    return [1e-2 * (1 - step / STEPS) for step in range(STEPS)]


SHAPES = [(33, 17), (129,), (), (5, 3, 2)]


def test_with_bias_correction_it_is_torchs_adamw() -> None:
    ours, theirs = _parameters(SHAPES), _parameters(SHAPES)
    config = AdamWConfig(lr=1e-2, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1)
    optimizer = AdamW(ours, config)
    reference = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.1, fused=True)
    for count, (rate, gradients) in enumerate(zip(_rates(), _gradients(SHAPES), strict=True), start=1):
        for p, q, g in zip(ours, theirs, gradients, strict=True):
            p.grad, q.grad = g.clone(), g.clone()
        set_update(optimizer, lr=rate, count=count)
        optimizer.step()
        reference.param_groups[0]["lr"] = rate
        reference.step()
        for p, q in zip(ours, theirs, strict=True):
            assert torch.equal(p, q)


def test_without_bias_correction_it_is_berts_update() -> None:
    params = _parameters(SHAPES)
    config = AdamWConfig(lr=1e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, bias_correction=False)
    optimizer = AdamW(params, config)
    weights = [p.detach().double() for p in params]
    first, second = [torch.zeros_like(w) for w in weights], [torch.zeros_like(w) for w in weights]
    for count, (rate, gradients) in enumerate(zip(_rates(), _gradients(SHAPES), strict=True), start=1):
        for i, (p, g) in enumerate(zip(params, gradients, strict=True)):
            p.grad = g.clone()
            first[i] = 0.9 * first[i] + 0.1 * g.double()
            second[i] = 0.999 * second[i] + 0.001 * g.double() ** 2
            update = first[i] / (second[i].sqrt() + 1e-6) + 0.01 * weights[i]
            weights[i] = weights[i] - rate * update
        set_update(optimizer, lr=rate, count=count)
        optimizer.step()
    for p, w in zip(params, weights, strict=True):
        torch.testing.assert_close(p.detach().double(), w, rtol=2e-6, atol=2e-7)


def test_groups_have_their_own_rate_and_decay() -> None:
    fast, slow, still = (nn.Parameter(torch.ones(4)) for _ in range(3))
    groups: list[dict[str, Any]] = [
        {"params": [fast], "weight_decay": 0.0},
        {"params": [slow], "weight_decay": 0.0, "lr_scale": 0.1},
        {"params": [still]},
    ]
    optimizer = AdamW(groups, AdamWConfig(lr=1e-2))
    fast.grad, slow.grad = torch.ones(4), torch.ones(4)
    set_update(optimizer, lr=1e-2, count=1)
    optimizer.step()
    torch.testing.assert_close((1 - fast.detach()) / (1 - slow.detach()), torch.full((4,), 10.0), rtol=1e-3, atol=0)
    assert torch.equal(still, torch.ones(4))  # no gradient: neither update nor decay


def test_an_unset_count_is_an_error() -> None:
    [p] = _parameters([(3,)])
    p.grad = torch.ones(3)
    with pytest.raises(TrainingError, match="set_update"):
        AdamW([p], AdamWConfig(lr=1e-2)).step()
