"""A forward and a backward pass wait for no GPU: nothing on the way needs a number that only the device knows."""

from dataclasses import replace

import pytest
import torch
from dispatched import Dispatched
from gpu_path import as_on_a_gpu
from step_batch import in_random_order, make_batch
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.layers.kernel_choice import force_kernel
from encoder_core.layers.rows import Rows
from encoder_core.objectives.modules.losses import CoupledObjective, ObjectiveModule
from tests.support.models.small_networks import NETWORKS, Network, build, memory, turns, with_forms


def a_pass(module: ObjectiveModule, batch: Batch, coupled: tuple[torch.Tensor, ...]) -> None:
    for losses in turns(module, batch, coupled):
        sum(term.weight * term.loss_sum for term in losses.terms).backward()  # type: ignore[union-attr]


@pytest.mark.default_cases(8)
@pytest.mark.heavy
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_a_pass_waits_for_no_device(network: Network) -> None:
    """By the written formula: the kernels of a CPU may ask it."""
    model = network.model.model_copy(update={"dropout": 0.1, "attention_dropout": 0.1})
    module = build(replace(network, model=model))
    batch = with_forms(network, make_batch([5, 20, 33, 1], 500))
    if network.objective.plm is not None:
        batch = in_random_order(make_batch([40] * 3, 500))
    with force_kernel("written"):
        coupled = memory(network, module, batch) if isinstance(module, CoupledObjective) else ()
        with Dispatched() as found:
            a_pass(module, batch, coupled)
    assert found.count > 100
    assert found.waits == []


SHORT = {"roberta", "spanbert", "deberta with order", "modernbert with dropout", "xlnet"}


@pytest.mark.heavy
@pytest.mark.parametrize(
    "network",
    [pytest.param(n, id=n.name, marks=() if n.name in SHORT else pytest.mark.long) for n in NETWORKS],
)
def test_a_pass_copies_nothing_that_is_waited_for(network: Network) -> None:
    """On a device that is not the host, and has no numbers: by the path that attention takes on a GPU."""
    # A student has a state for each layer of its own.
    layers = network.model.layers if network.objective.hidden else 2
    model = network.model.model_copy(update={"dropout": 0.1, "attention_dropout": 0.1, "layers": layers})
    batch = with_forms(network, make_batch([5, 20, 33, 1], 500))
    if network.objective.plm is not None:
        batch = in_random_order(make_batch([40] * 3, 500))
    network = replace(network, model=model)
    coupled: tuple[Tensor, ...] = ()
    if network.objective.contrastive is not None:
        coupled = tuple(x.to("meta") for x in memory(network, build(network), batch))
    with torch.device("meta"):
        module = build(network)
    batch = batch.to(torch.device("meta"))
    launches: list[str] = []
    with as_on_a_gpu(module, launches.append), Dispatched() as found:
        a_pass(module, batch, coupled)
    assert found.waits == []
    assert {"fused forward", "fused queries", "fused keys"} <= set(launches)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["deberta taught by roberta", "deberta with spans", "deberta v2 with order"])
def test_what_the_host_knows_of_a_batch_is_so(name: str) -> None:
    """Of targets that a term makes, too: every token, where a student learns everywhere."""
    (network,) = (network for network in NETWORKS if network.name == name)
    module, batch = build(network).eval(), make_batch([5, 20, 33, 1], 500)
    sums = [
        torch.stack([term.loss_sum for term in module(given).terms]) for given in (batch, replace(batch, host=batch))
    ]
    assert torch.equal(*sums)


def test_waiting_is_seen() -> None:
    rows = Rows.from_batch(make_batch([3, 4], 500))
    with Dispatched() as found:
        x = torch.arange(4)
        _ = [x[x > 1], x.sum().item(), torch.repeat_interleave(x), rows.cu_seqlens.tolist()]
    assert set(found.waits) >= {"index", "_local_scalar_dense", "repeat_interleave"}
    with Dispatched() as found:
        _ = [x.to("meta"), x.to("meta", non_blocking=True), torch.zeros(4, device="meta").copy_(x)]
    assert found.waits == ["_to_copy", "copy_"]


def test_a_batch_that_was_moved_knows_what_it_was() -> None:
    batch = make_batch([3, 4], 500)
    moved = batch.to(torch.device("meta"))
    assert moved.tokens.device.type == moved.cu_seqlens.device.type == "meta"
    assert moved.on_host is batch
    assert batch.on_host is batch
    assert moved.max_length == batch.max_length
