"""Formulas for what is kept for the backward pass, against what autograd saves, for every family, in fp32 on a CPU."""

import pytest
import torch

from encoder_core.cost.activations import Activations
from encoder_core.cost.products import Shape
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.terms.composition import activations
from launcher.runtime.recipe.objective import MlmTerm, RecipeObjective
from tests.support.models.saved import measured, of_autograd
from tests.support.models.small_networks import NETWORKS, SHAPE, Network, build, full_rows, memory

pytestmark = pytest.mark.heavy

STATE = torch.float32.itemsize


def expected(network: Network) -> list[Activations]:
    groups = activations(network.model, network.objective.terms, SHAPE, "cpu")
    return [of_autograd(one) for one in groups]


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_saved_activations_are_within_three_percent(network: Network) -> None:
    module, batch = build(network), full_rows(network)
    found = measured(module, batch, memory(network, module, batch))
    assert [a.bytes(STATE) for a in expected(network)] == pytest.approx(found, rel=0.03)


@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_checkpointed_activations_are_within_ten_percent(network: Network) -> None:
    module, batch = build(network, checkpoint_activations=True), full_rows(network)
    remembered = memory(network, module, batch)
    found = measured(module, batch, remembered)
    if network.objective.plm is not None:  # what was remembered is an input
        found[0] -= sum(tensor.untyped_storage().nbytes() for tensor in remembered)
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
    (expected,) = activations(model, network.objective.terms, shape, "cpu")
    assert [expected.bytes(STATE)] == pytest.approx(measured(module, batch, ()), rel=0.03)


@pytest.mark.parametrize(
    "network",
    [n for n in NETWORKS if n.name in ("roberta", "spanbert", "albert", "electra")],
    ids=lambda n: n.name,
)
def test_in_bf16_states_are_half_as_large(network: Network) -> None:
    module, batch = build(network).bfloat16(), full_rows(network)
    found = measured(module, batch, ())
    assert [a.bytes(torch.bfloat16.itemsize) for a in expected(network)] == pytest.approx(found, rel=0.03)
