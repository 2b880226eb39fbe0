"""Counted products against torch's FLOP counter, forward and backward, for every family."""

from dataclasses import replace
from itertools import chain

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from encoder_core.batch import Batch
from encoder_core.cost.products import count, pre_norm_layer
from encoder_core.layers.attention import SelfAttention, reference
from encoder_core.layers.deberta_attention import DisentangledAttention, padded
from encoder_core.layers.kernel_choice import only
from encoder_core.layers.xlnet_attention import TwoStreamAttention
from encoder_core.objectives.contrastive import ContrastiveModel
from encoder_core.objectives.losses import ObjectiveModule as Module
from encoder_core.objectives.teacher import FrozenNetworks
from encoder_core.terms.composition import products
from encoder_core.terms.contrastive import ContrastiveConfig
from launcher.runtime.recipe.objective import RecipeObjective
from tests.support.models.small_networks import NETWORKS, SHAPE, Network, build, full_rows, memory, turns

pytestmark = pytest.mark.heavy


def with_counted_kernels(module: Module) -> Module:
    """Kernels made of products that the counter sees: the reference for plain attention, the padded ones of DeBERTa
    and XLNet."""
    held = [part.networks for part in module.modules() if isinstance(part, FrozenNetworks)]
    for part in chain(module.modules(), *(network.modules() for networks in held for network in networks)):
        if isinstance(part, DisentangledAttention):
            part.attend = padded
        elif isinstance(part, TwoStreamAttention):
            part.blocked = part.padded  # type: ignore[method-assign]
        elif isinstance(part, SelfAttention) and not isinstance(part.attend, torch.nn.Module):
            part.attend = reference
    return module


def in_place(out: torch.Size, a: torch.Size, b: torch.Size, **_: object) -> int:
    """The counter knows addmm, not its in-place form, which the head's gradient uses."""
    return 2 * a[0] * a[1] * b[1]


def measured(module: Module, batch: Batch, remembered: tuple[Tensor, ...], *, backward: bool) -> int:
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: in_place})
    with counter, torch.set_grad_enabled(backward):
        for losses in turns(module, batch, remembered):
            if backward:
                sum(term.loss_sum for term in losses.terms).backward()  # type: ignore[union-attr]
    return counter.get_total_flops()


@pytest.mark.long
@pytest.mark.default_cases(8)
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_flops_are_those_that_torch_counts(network: Network) -> None:
    """Span boundaries: every target has one, in runs of two."""
    module, batch = with_counted_kernels(build(network)), full_rows(network)
    remembered, unseen = memory(network, module, batch), out_of_sight(network)
    counted = count(products(network.model, network.objective.terms, SHAPE))
    with only("written"):  # which a decoder reads an encoder's states by
        assert measured(module, batch, remembered, backward=False) == counted.forward + unseen
        assert measured(module, batch, remembered, backward=True) == counted.model + 3 * unseen


def out_of_sight(network: Network) -> int:
    """What the reference makes of a decoder's scores and values that are hidden: those of later tokens."""
    if not network.model.decodes:
        return 0
    pairs = SHAPE.length * (SHAPE.length - 1) // 2
    return 2 * 2 * SHAPE.rows * network.model.hidden * pairs * network.model.layers


@pytest.mark.parametrize(
    "network", [n for n in NETWORKS if not n.model.decodes], ids=lambda network: network.name
)
def test_flops_of_text_vectors(network: Network) -> None:
    """The encoder of any family that has no decoder; XLNet's rows are read forward, without memory."""
    vectors = replace(network, objective=RecipeObjective(contrastive=ContrastiveConfig(projection=True)))
    module, batch = with_counted_kernels(build(vectors)), full_rows(vectors)
    assert isinstance(module, ContrastiveModel)
    counted = count(products(vectors.model, vectors.objective.terms, SHAPE))
    segments = torch.zeros_like(batch.tokens)
    counter = FlopCounterMode(display=False)
    with counter:
        forward = module.embed(replace(batch, segments=segments))
        assert counter.get_total_flops() == counted.forward
        forward.sum().backward()
    assert counter.get_total_flops() == counted.model


@given(length=st.integers(1, 300), window=st.integers(1, 320))
def test_a_window_counts_the_scores_in_sight(length: int, window: int) -> None:
    """The reference kernel, which torch counts in the other tests, makes all scores and hides those out of sight."""
    at = torch.arange(length)
    in_sight = int(((at[:, None] - at).abs() <= window).sum())
    rows, heads, hidden, inner = 3, 4, 32, 96
    local = count(list(pre_norm_layer(rows, length, heads, hidden, inner, shared=hidden, window=window)))
    whole = count(list(pre_norm_layer(rows, length, heads, hidden, inner, shared=hidden, window=None)))
    assert whole.forward - local.forward == 2 * 2 * rows * hidden * (length**2 - in_sight)


@pytest.mark.long
@pytest.mark.default_cases(8)
@pytest.mark.parametrize("network", NETWORKS, ids=lambda network: network.name)
def test_activation_checkpointing_runs_the_layers_once_more(network: Network) -> None:
    module, batch = with_counted_kernels(build(network, checkpoint_activations=True)), full_rows(network)
    remembered, unseen = memory(network, module, batch), out_of_sight(network)
    counted = count(products(network.model, network.objective.terms, SHAPE))
    with only("written"):
        found = measured(module, batch, remembered, backward=True)
    assert found == counted.model + counted.recomputed + 4 * unseen
