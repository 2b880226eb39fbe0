"""A forward and a backward pass wait for no GPU: nothing on the way needs a number that only the device knows."""

from dataclasses import replace

import pytest
import torch
from step_batch import in_random_order, make_batch

from encoder_core.batch import Batch
from encoder_core.layers.kernel_choice import only
from encoder_core.layers.rows import Rows
from encoder_core.objectives.losses import CoupledObjective, ObjectiveModule
from tests.support.models.dispatch import Waits
from tests.support.models.small_networks import NETWORKS, Network, build, memory, turns


def a_pass(module: ObjectiveModule, batch: Batch, coupled: tuple[torch.Tensor, ...]) -> None:
    for losses in turns(module, batch, coupled):
        sum(term.weight * term.loss_sum for term in losses.terms).backward()  # type: ignore[union-attr]


@pytest.mark.heavy
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_a_pass_waits_for_no_device(network: Network) -> None:
    """By the written formula: the kernels of a CPU may ask it."""
    model = network.model.model_copy(update={"dropout": 0.1, "attention_dropout": 0.1})
    module = build(replace(network, model=model))
    batch = make_batch([5, 20, 33, 1], 500)
    if network.objective.plm is not None:
        batch = in_random_order(make_batch([40] * 3, 500))
    with only("written"):
        coupled = memory(network, module, batch) if isinstance(module, CoupledObjective) else ()
        with Waits() as waits:
            a_pass(module, batch, coupled)
    assert waits.operations > 100
    assert waits.found == []


def test_waiting_is_seen() -> None:
    rows = Rows.of(make_batch([3, 4], 500))
    with Waits() as waits:
        x = torch.arange(4)
        _ = [x[x > 1], x.sum().item(), torch.repeat_interleave(x), rows.cu_seqlens.tolist()]
    assert set(waits.found) >= {"index", "_local_scalar_dense", "repeat_interleave"}


def test_a_batch_that_was_moved_knows_what_it_was() -> None:
    batch = make_batch([3, 4], 500)
    moved = batch.to(torch.device("meta"))
    assert moved.tokens.device.type == moved.cu_seqlens.device.type == "meta"
    assert moved.on_host is batch
    assert batch.on_host is batch
    assert moved.max_length == batch.max_length
