"""Dropout: its rate, its mean, its gradient, and when it does nothing."""

import pytest
import torch

from encoder_core.layers.dropout import Dropout, dropout


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_drops_at_the_asked_rate_and_keeps_the_mean(rate: float) -> None:
    torch.manual_seed(0)
    y = dropout(torch.ones(1000, 1001), rate)
    error = (rate * (1 - rate) / y.numel()) ** 0.5
    assert abs((y == 0).float().mean().item() - rate) < 4 * error
    assert y.unique().tolist() == pytest.approx([0.0, 1 / (1 - rate)], rel=1e-4)


def test_the_gradient_is_that_of_the_drawn_mask() -> None:
    x = torch.rand(7, 5, dtype=torch.float64, requires_grad=True)

    def drop(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return dropout(x, 0.4)

    assert torch.autograd.gradcheck(drop, x)
    assert (drop(x) == 0).any()


def test_repeats_with_the_seed_and_changes_with_it() -> None:
    outcomes = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outcomes.append(dropout(torch.ones(100), 0.3))
    assert torch.equal(outcomes[0], outcomes[1])
    assert not torch.equal(outcomes[0], outcomes[2])


def test_evaluation_and_a_rate_of_zero_change_nothing() -> None:
    x = torch.rand(3, 4)
    assert Dropout(0.5).eval()(x) is x
    assert Dropout(0.0)(x) is x
    assert Dropout(0.5)(x[:0]).shape == (0, 4)


def test_keeps_the_dtype() -> None:
    assert dropout(torch.ones(4, dtype=torch.bfloat16), 0.1).dtype == torch.bfloat16
