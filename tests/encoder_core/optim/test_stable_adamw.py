"""StableAdamW unsharded: its state is AdamW's, and it divides by no zero. Against the paper's algorithm:
test_whole_zero.py."""

import torch
from torch import nn

from encoder_core.optim.adamw import AdamW, StableAdamW
from encoder_core.optim.settings import AdamWConfig, StableAdamWConfig
from encoder_core.optim.updates import set_update

RATE, BETAS = 0.01, (0.9, 0.98)


def _pair() -> tuple[nn.Parameter, nn.Parameter, StableAdamW, AdamW]:
    torch.manual_seed(1)
    p = nn.Parameter(torch.randn(30, 20))
    q = nn.Parameter(p.detach().clone())
    return (
        p,
        q,
        StableAdamW([p], StableAdamWConfig(lr=RATE, betas=BETAS)),
        AdamW([q], AdamWConfig(lr=RATE, betas=BETAS)),
    )


def _step(p: nn.Parameter, optimizer: torch.optim.Optimizer, gradient: torch.Tensor, count: int) -> float:
    """The root mean square of the update."""
    before = p.detach().clone()
    p.grad = gradient.clone()
    set_update(optimizer, lr=RATE, count=count)
    optimizer.step()
    return float((p.detach() - before).square().mean().sqrt())


def test_a_run_may_go_on_from_adamws_moments() -> None:
    """The same kinds of state, with the same meaning."""
    p, q, stable, adamw = _pair()
    g = torch.randn(30, 20)
    _step(p, stable, g, 1)
    _step(q, adamw, g, 1)
    for kind, moment in adamw.state[q].items():
        torch.testing.assert_close(stable.state[p][kind], moment)


def test_no_gradient_is_no_division_by_zero() -> None:
    p = nn.Parameter(torch.ones(3))
    optimizer = StableAdamW([p], StableAdamWConfig(lr=RATE, weight_decay=0.0))
    assert _step(p, optimizer, torch.zeros(3), 1) == 0.0
