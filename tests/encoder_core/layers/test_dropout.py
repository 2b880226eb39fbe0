"""Dropout: its rate, its mean, its gradient, when it does nothing, and whose its draws are."""

import pytest
import torch

from encoder_core.layers.dropout import Dropout, dropout


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_drops_at_the_asked_rate_and_keeps_the_mean(rate: float) -> None:
    torch.manual_seed(0)
    y = dropout(torch.ones(1000, 1001), rate, torch.arange(1000))
    error = (rate * (1 - rate) / y.numel()) ** 0.5
    assert abs((y == 0).float().mean().item() - rate) < 4 * error
    assert y.unique().tolist() == pytest.approx([0.0, 1 / (1 - rate)], rel=1e-4)


def test_the_gradient_is_that_of_the_drawn_mask() -> None:
    x = torch.rand(7, 5, dtype=torch.float64, requires_grad=True)

    def drop(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return dropout(x, 0.4, torch.arange(7))

    assert torch.autograd.gradcheck(drop, x)
    assert (drop(x) == 0).any()


def test_repeats_with_the_seed_and_changes_with_it_and_with_each_draw() -> None:
    outcomes = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outcomes.append(dropout(torch.ones(1, 100), 0.3, torch.arange(1)))
    outcomes.append(dropout(torch.ones(1, 100), 0.3, torch.arange(1)))
    assert torch.equal(outcomes[0], outcomes[1])
    assert len({tuple(outcome.flatten().tolist()) for outcome in outcomes}) == 3


def test_a_place_has_its_draws_whatever_it_is_among() -> None:
    keys = torch.randint(-(2**63), 2**63 - 1, (40,))
    torch.manual_seed(4)
    whole = dropout(torch.ones(40, 30), 0.3, keys)
    some = torch.randperm(40)[:13]
    torch.manual_seed(4)
    assert torch.equal(dropout(torch.ones(13, 30), 0.3, keys[some]), whole[some])


def test_evaluation_and_a_rate_of_zero_change_nothing() -> None:
    x, keys = torch.rand(3, 4), torch.arange(3)
    assert Dropout(0.5).eval()(x, keys) is x
    assert Dropout(0.0)(x, keys) is x
    assert Dropout(0.5)(x[:0], keys[:0]).shape == (0, 4)
