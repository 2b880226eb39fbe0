"""Draws belong to rows: loss and gradient of a step do not depend on how its rows are cut into microbatches."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from step_batch import in_random_order, make_batch

from encoder_core.batch import Batch
from encoder_core.objectives.modules.losses import ObjectiveModule
from encoder_core.train.step import seed_draws
from tests.support.models.small_networks import NETWORKS, Network, build, first_pass, with_forms


def cut(batch: Batch, first: int, last: int) -> Batch:
    """Rows `first` to `last` - 1, which keep their numbers."""
    start, stop = (int(batch.cu_seqlens[edge]) for edge in (first, last))
    mine = (batch.target_positions >= start) & (batch.target_positions < stop)

    def part(values: torch.Tensor | None, low: int, high: int) -> Any:
        return None if values is None else values[low:high]

    lengths = batch.cu_seqlens.diff()[first:last]
    return replace(
        batch,
        tokens=batch.tokens[start:stop],
        cu_seqlens=batch.cu_seqlens[first : last + 1] - start,
        max_length=int(lengths.max()),
        positions=batch.positions[start:stop],
        target_positions=batch.target_positions[mine] - start,
        target_ids=batch.target_ids[mine],
        segments=part(batch.segments, start, stop),
        pair_labels=part(batch.pair_labels, first, last),
        order=part(batch.order, start, stop),
        reversed_rows=part(batch.reversed_rows, first, last),
        numbers=torch.arange(first, last),
        corrupted=None if batch.corrupted is None else cut(batch.corrupted, first, last),
    )


def step(module: ObjectiveModule, parts: list[Batch]) -> tuple[float, dict[str, torch.Tensor]]:
    """Sum of the losses of all parts, and its gradient."""
    module.zero_grad()
    total = 0.0
    for batch, remembered in zip(parts, first_pass(module, parts, lambda _: seed_draws(7, 3, 0)), strict=True):
        for name in module.update_groups():
            seed_draws(7, 3, 0, name)
            losses = module(batch, remembered) if remembered else module(batch)
            remembered = losses.memory
            loss = sum(term.weight * term.loss_sum for term in losses.terms)
            assert isinstance(loss, torch.Tensor)
            loss.backward()
            total += loss.item()
    return total, {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


SHORT = (
    "roberta",
    "bert condensed",
    "deberta with spans",
    "electra",
    "roberta with vectors",
    "xlnet",
    "bart",
)


@pytest.mark.heavy
@pytest.mark.parametrize(
    "network",
    [pytest.param(n, id=n.name, marks=() if n.name in SHORT else pytest.mark.long) for n in NETWORKS],
)
def test_microbatches_change_nothing(network: Network) -> None:
    """Every second network recomputes its activations."""
    number = NETWORKS.index(network)
    draws, checkpointed = np.random.default_rng(number), number % 2 == 1
    model = network.model.model_copy(update={"dropout": 0.3, "attention_dropout": 0.3})
    module = build(replace(network, model=model), recompute=checkpointed).double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    torch.manual_seed(number)
    lengths = [int(n) for n in draws.integers(5, 40, 6)]
    whole = with_forms(network, make_batch(lengths, 500))
    if network.objective.plm is not None:
        lengths = [40] * 6
        whole = replace(in_random_order(make_batch(lengths, 500)), reversed_rows=torch.arange(6) % 2 == 1)
    loss, gradient = step(module, [whole])
    edges = [0, *sorted(int(edge) for edge in draws.choice(range(1, 6), 2, replace=False)), 6]
    other, others = step(module, [cut(whole, a, b) for a, b in pairwise(edges)])
    assert other == pytest.approx(loss, rel=1e-10)
    for name, expected in gradient.items():
        torch.testing.assert_close(others[name], expected, rtol=1e-7, atol=1e-10)
    module.eval()
    calm, _ = step(module, [whole])
    assert calm != pytest.approx(loss, rel=1e-6)  # dropout did something
