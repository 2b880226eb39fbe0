"""What the encoder promises whatever the family."""

from functools import partial

import pytest
import torch

from encoder_core.families.roberta import RobertaConfig
from encoder_core.layers.initialise import initialise
from encoder_core.layers.sizes import Initializer
from tests.support.models.parity import gradients_of, make_batch, random_weights
from tests.support.models.small_networks import NETWORKS, build, full_rows, turns

CONFIG = RobertaConfig(layers=2, hidden=16, heads=2, feed_forward=32, max_length=24, vocab=50)


@pytest.mark.parametrize("name", ["roberta", "deberta", "deberta v2", "xlnet", "bart"])
def test_activation_checkpointing_changes_no_bit(name: str) -> None:
    """Of every kind of layers."""
    network = next(network for network in NETWORKS if network.name == name)
    found = []
    for checkpointed in (False, True):
        module = build(network, recompute=checkpointed)
        initialise(module, 0.1)
        torch.manual_seed(7)
        for losses in turns(module, full_rows(network), ()):
            torch.stack([term.loss_sum for term in losses.terms]).sum().backward()
        found.append(gradients_of(module))
    for parameter, gradient in found[0].items():
        assert torch.equal(gradient, found[1][parameter]), parameter


def _count(sizes: list[int], x: torch.Tensor) -> torch.Tensor:
    sizes.append(x.numel())
    return x


def test_activation_checkpointing_holds_less() -> None:
    held: dict[bool, int] = {}
    for flag in (False, True):
        model = random_weights(CONFIG.encoder()).train()
        model.checkpoint_activations = flag
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(partial(_count, sizes), lambda x: x):
            model(make_batch([24] * 8, 50))
        held[flag] = sum(sizes)
    assert held[True] < held[False] / 3


def test_dropout_acts_in_training_only() -> None:
    model = random_weights(CONFIG.encoder())
    batch = make_batch([5, 9], 50)
    assert torch.equal(model.eval()(batch), model(batch))
    assert not torch.equal(model.train()(batch), model(batch))


@pytest.mark.parametrize(("initializer", "std"), [("truncated_normal", 0.0176), ("normal", 0.02)])
def test_initial_values_follow_the_table(initializer: Initializer, std: float) -> None:
    model = CONFIG.model_copy(update={"hidden": 128, "feed_forward": 512}).encoder()
    torch.manual_seed(0)
    initialise(model, 0.02, initializer)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            assert (parameter.abs().max() <= 0.04) == (initializer == "truncated_normal"), name
            drawn = parameter[parameter.any(dim=-1)]
            assert drawn.std().item() == pytest.approx(std, rel=0.05), name
    first = {name: parameter.clone() for name, parameter in model.named_parameters()}
    torch.manual_seed(0)
    initialise(model, 0.02, initializer)
    assert all(torch.equal(first[name], parameter) for name, parameter in model.named_parameters())


def test_a_parameter_outside_the_table_is_refused() -> None:
    with pytest.raises(TypeError, match=r"\bweight\b.*\bConv2d\b"):
        initialise(torch.nn.Conv2d(2, 2, 1))
