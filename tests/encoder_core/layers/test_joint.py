"""Several Linears with one backward pass are what they are; networks stay what they are."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from encoder_core.layers import attention, deberta_attention
from encoder_core.layers.parameters import project, project_jointly
from encoder_core.train.step import seed_draws
from tests.support.models.small_networks import NETWORKS, Network, build, full_rows, memory, turns


def gradients(outputs: tuple[torch.Tensor, ...], wanted: list[torch.Tensor]) -> tuple[torch.Tensor | None, ...]:
    torch.manual_seed(3)
    loss = sum((out * torch.randn_like(out)).sum() for out in outputs)
    assert isinstance(loss, torch.Tensor)
    return torch.autograd.grad(loss, wanted, allow_unused=True)


@pytest.mark.parametrize("seed", range(12))
def test_outputs_and_gradients_are_those_of_the_linears(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    tokens, inputs, biased = draw.choice((0, 1, 17)), draw.randint(1, 9), seed % 3 > 0
    linears = [nn.Linear(inputs, draw.randint(1, 9), bias=biased).double() for _ in range(draw.randint(1, 3))]
    for linear in linears:
        for p in linear.parameters():
            p.requires_grad_(draw.random() < 0.8)
    x = torch.randn(tokens, inputs, dtype=torch.float64, requires_grad=draw.random() < 0.8)
    wanted = [p for p in (x, *nn.ModuleList(linears).parameters()) if p.requires_grad]
    apart, together = tuple(linear(x) for linear in linears), project_jointly(x, linears)
    for one, other in zip(apart, together, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-12, atol=1e-12)
        assert other.is_contiguous()
    if not wanted:
        return
    for first, second in zip(gradients(apart, wanted), gradients(together, wanted), strict=True):
        torch.testing.assert_close(second, first, rtol=1e-12, atol=1e-12)


def test_a_cpu_takes_the_linears_one_by_one() -> None:
    calls: list[int] = []
    linears = [nn.Linear(4, 4) for _ in range(3)]
    for linear in linears:
        linear.register_forward_hook(lambda *given: calls.append(1))
    project(torch.ones(2, 4), linears)
    assert len(calls) == 3


SHORT = ("bert", "deberta_v2", "eurobert")


def networks() -> Iterator[Any]:
    """The default suite has the first network of some families."""
    seen = set[str]()
    for network in NETWORKS:
        short = network.model.family in SHORT and network.model.family not in seen
        seen.add(network.model.family)
        yield pytest.param(network, id=network.name, marks=() if short else pytest.mark.long)


@pytest.mark.parametrize("network", list(networks()))
def test_networks_stay_what_they_are(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp64, with the one backward pass on this CPU: losses and gradients, by parameters that keep their names."""
    module = build(network).double()
    batch = full_rows(network)

    def passed() -> tuple[list[float], dict[str, torch.Tensor]]:
        module.zero_grad()
        seed_draws(1, 2, 0)
        losses = [
            sum(term.weight * term.loss_sum for term in each.terms)
            for each in turns(module, batch, memory(network, module, batch))
        ]
        for loss in losses:
            assert isinstance(loss, torch.Tensor)
            loss.backward()
        found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        return [torch.as_tensor(loss).item() for loss in losses], found

    losses, before = passed()
    used = []

    def always(x: torch.Tensor, linears: tuple[nn.Linear, ...]) -> tuple[torch.Tensor, ...]:
        used.append(len(linears))
        return project_jointly(x, linears)

    for place in (attention, deberta_attention):
        monkeypatch.setattr(place, "project", always)
    again, after = passed()
    assert again == pytest.approx(losses, rel=1e-10)
    assert after.keys() == before.keys()
    for name, expected in before.items():
        torch.testing.assert_close(after[name], expected, rtol=1e-8, atol=1e-11)
    assert used or network.model.family in ("xlnet", "modernbert", "deberta")
