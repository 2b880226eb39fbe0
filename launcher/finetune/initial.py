"""Draws new parameters from a seed and their names, so a parameter's values do not depend on what else is new, or in
which order."""

from collections.abc import Set

import torch
from torch import nn

from data_service.rng import draws64, stream_key

_SIGNED = 2**63


def seed_of(*parts: int | str) -> int:
    """A seed for torch's generators, from what it is for."""
    return int(draws64(stream_key("fine-tuning", *parts), 0, 1)[0]) % _SIGNED


@torch.no_grad()
def initialise(model: nn.Module, names: Set[str], spread: float, seed: int) -> None:
    """Draw the named parameters of `model` anew: N(0, `spread`), norms 1, biases 0, weights of a mixture equal.

    As transformers does it, but for an independent stream for each parameter.
    """
    for path, module in model.named_modules():
        norm = "norm" in type(module).__name__.lower()
        for own, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{own}" if path else own
            if name not in names:
                continue
            if norm:
                parameter.fill_(1.0 if own == "weight" else 0.0)
            elif parameter.ndim == 1:
                parameter.zero_()
            elif parameter.ndim == 0:
                parameter.fill_(1.0)
            else:
                generator = torch.Generator().manual_seed(seed_of(seed, "initial", name))
                parameter.normal_(0.0, spread, generator=generator)
