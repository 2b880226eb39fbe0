"""A rank without rows in a microbatch, or whose rows have no targets: every network must still take part in what ranks
do together."""

from dataclasses import replace

import pytest
import torch

from encoder_core.batch import idle_batch
from encoder_core.objectives.modules.losses import CoupledObjective
from tests.support.models.small_networks import NETWORKS, Network, build, full_rows, memory, turns


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
@pytest.mark.parametrize("training", [True, False])
def test_an_idle_batch_reaches_every_parameter(network: Network, training: bool) -> None:
    """A parameter without a gradient would not be reduced on this rank, and the others would wait for it."""
    module = build(network).train(training)
    batch = idle_batch(torch.device("cpu"))
    coupled = memory(network, module, batch) if isinstance(module, CoupledObjective) else ()
    for losses in turns(module, batch, coupled):
        assert all(term.targets == 0 for term in losses.terms)
        torch.stack([term.loss_sum for term in losses.terms]).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_rows_without_targets_reach_every_parameter(network: Network) -> None:
    module, rows = build(network), full_rows(network)
    none = rows.target_ids[:0]
    order = None if rows.order is None else torch.zeros_like(rows.order)
    languages = rows.segments if hasattr(network.model, "languages") else None
    batch = replace(rows, target_positions=none, target_ids=none, order=order, languages=languages)
    coupled = memory(network, module, batch) if isinstance(module, CoupledObjective) else ()
    for losses in turns(module, batch, coupled):
        torch.stack([term.loss_sum for term in losses.terms]).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
