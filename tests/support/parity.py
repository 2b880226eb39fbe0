"""Weights across to transformers and back by the key tables, and the tolerances that are never relaxed."""

from typing import TypeVar

import torch
from torch import Tensor, nn

from encoder_core.families.hf.interchange import Interchange

Model = TypeVar("Model", bound=nn.Module)

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
GRADIENT_TOLERANCE = 1e-8  # absolute, in fp64


@torch.no_grad()
def random_weights(model: Model, seed: int = 0) -> Model:
    """Every parameter normal(0, 0.1), biases and norms included, so that none can be left out unnoticed."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(0.0, 0.1, generator=generator)
    return model


def assert_close(actual: Tensor, expected: Tensor) -> None:
    """Largest difference relative to the largest expected value, within 1e-5 in fp32 and 1e-10 in fp64."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    difference = (actual - expected).abs().max() / expected.abs().max()
    assert difference <= TOLERANCE[expected.dtype], f"relative difference {difference:.2e}"


@torch.no_grad()
def copy_from(theirs: nn.Module, ours: nn.Module, their: Interchange) -> None:
    """Their weights into our model. Folded tables are handled as on import."""
    state, parameters = theirs.state_dict(), dict(ours.named_parameters())
    matched = their.table.match(state, their.layers, "their model")
    assert set(matched) == set(parameters)
    for name, theirs_name in matched.items():
        parameters[name].copy_(state[theirs_name])
    for fold in their.table.folds:
        parameters[fold.ours] += state[fold.theirs][0]


@torch.no_grad()
def copy_into(theirs: nn.Module, ours: nn.Module, their: Interchange) -> None:
    """Our weights into their model, folded tables zero, as on export."""
    parameters = dict(ours.named_parameters())
    names = their.table.names(their.layers)
    assert set(names) == set(parameters)
    state = {theirs_name: parameters[name] for name, theirs_name in names.items()}
    for fold in their.table.folds:
        state[fold.theirs] = torch.zeros_like(theirs.state_dict()[fold.theirs])
    outcome = theirs.load_state_dict(state, strict=False)
    assert not outcome.unexpected_keys
    assert set(outcome.missing_keys) <= set(their.table.tied)
