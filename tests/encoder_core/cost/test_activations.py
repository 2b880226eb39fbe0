"""Formulas for what is kept for the backward pass, against what autograd saves, for every family, in fp32 on a CPU."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.cost.activations import Activations, of_update_groups
from encoder_core.cost.products import Shape
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.objectives.losses import LossSums
from encoder_core.objectives.losses import ObjectiveModule as Module
from launcher.recipe.objective import MlmTerm, RecipeObjective
from tests.support.models.small_networks import NETWORKS, SHAPE, Network, build, full_rows, memory

pytestmark = pytest.mark.heavy

STATE = torch.float32.itemsize
SIGHT = ("places of distances", "segments differ")


def saved_bytes(module: Module, forward: Callable[[], object]) -> int:
    """Bytes of distinct storages that autograd packs, parameters apart."""
    known = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        found.setdefault(
            tensor.untyped_storage().data_ptr(), tensor
        )  # kept, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for at, tensor in found.items() if at not in known)


def measured(network: Network, module: Module, batch: Batch, remembered: tuple[Tensor, ...]) -> list[int]:
    """For each turn of a step."""
    sizes = []
    for _ in module.update_groups():
        losses: list[LossSums] = []
        given = (batch, remembered) if remembered else (batch,)
        sizes.append(saved_bytes(module, lambda given=given, losses=losses: losses.append(module(*given))))  # type: ignore[misc]
        remembered = losses[0].memory
    return sizes


def expected(network: Network) -> list[Activations]:
    return of_update_groups(network.model, network.terms, SHAPE, "cpu", backwards=True)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_saved_activations_are_within_three_percent(network: Network) -> None:
    module, batch = build(network), full_rows(network)
    found = measured(network, module, batch, memory(network, module, batch))
    assert [a.bytes(STATE) for a in expected(network)] == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_checkpointed_activations_are_within_ten_percent(network: Network) -> None:
    module, batch = build(network, checkpoint_activations=True), full_rows(network)
    remembered = memory(network, module, batch)
    found = measured(network, module, batch, remembered)
    if (
        network.objective.plm is not None
    ):  # what was remembered is an input, and who sees whom is not a tensor's
        found[0] -= sum(tensor.untyped_storage().nbytes() for tensor in remembered)
        found[0] += sum(a.bytes(STATE) for a in expected(network)[0].outside if a.what in SIGHT)
    assert [a.checkpointed(STATE) for a in expected(network)] == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_windows_keep_what_their_blocks_keep(dropout: float) -> None:
    """Rows longer than the window of most layers."""
    model = ModernBertConfig(
        layers=4,
        hidden=32,
        heads=4,
        feed_forward=40,
        vocab=500,
        local_attention=32,
        attention_dropout=dropout,
    )
    network = Network("modernbert", model, RecipeObjective(mlm=MlmTerm()))
    shape = Shape(rows=2, length=200, targets_per_row=20)
    module, batch = build(network), full_rows(network, shape)
    (expected,) = of_update_groups(model, network.terms, shape, "cpu")
    assert [expected.bytes(STATE)] == pytest.approx(measured(network, module, batch, ()), rel=0.03)


@pytest.mark.parametrize(
    "network",
    [n for n in NETWORKS if n.name in ("roberta", "spanbert", "albert", "electra")],
    ids=lambda n: n.name,
)
def test_in_bf16_states_are_half_as_large(network: Network) -> None:
    module, batch = build(network).bfloat16(), full_rows(network)
    found = measured(network, module, batch, ())
    assert [a.bytes(torch.bfloat16.itemsize) for a in expected(network)] == pytest.approx(found, rel=0.03)
