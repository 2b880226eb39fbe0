"""The optimizer of a fine-tuning: AdamW, a rate for each layer, linear warmup and decay."""

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import nn

from launcher.after.finetune.network import TaskNetwork
from launcher.after.finetune.settings import FinetuneSettings


class _Kept(NamedTuple):
    """What parameters of one group have in common."""

    rate: float
    decays: bool


def make_optimizer(network: TaskNetwork, settings: FinetuneSettings) -> torch.optim.AdamW:
    """AdamW over what learns. Each group's `peak` is its learning rate after the warmup.

    A parameter at depth d of L layers has `lr * layer_decay ** (L + 1 - d)`: the head's rate is `lr`, the top layer's
    one step lower, the embeddings' the lowest. (ELECTRA's code counts one step more below the head.)
    """
    groups: dict[_Kept, list[nn.Parameter]] = {}
    for name, parameter, depth in _learning(network):
        rate = settings.lr * settings.layer_decay ** (network.layout.layers + 1 - depth)
        groups.setdefault(_Kept(rate, _decays(name, parameter)), []).append(parameter)
    return torch.optim.AdamW(
        [
            {
                "params": parameters,
                "lr": kept.rate,
                "peak": kept.rate,
                "weight_decay": settings.weight_decay if kept.decays else 0.0,
            }
            for kept, parameters in groups.items()
        ],
        betas=settings.adam_betas,
        eps=settings.adam_epsilon,
    )


def _learning(network: TaskNetwork) -> Iterator[tuple[str, nn.Parameter, int]]:
    above = network.layout.layers + 1
    depths = {id(p): network.layout.depths[name] for name, p in network.encoder.named_parameters()}
    for name, parameter in network.named_parameters():
        if parameter.requires_grad:
            yield name, parameter, depths.get(id(parameter), above)


def _decays(name: str, parameter: nn.Parameter) -> bool:
    """Neither biases, of which XLNet's have two dimensions, nor norms, nor weights of a mixture."""
    return parameter.ndim > 1 and not name.rpartition(".")[2].endswith("bias")


def rate_share(step: int, steps: int, warmup: float) -> float:
    """The share of the peak rate at `step` of `steps`, both from 0; as transformers' linear schedule with warmup."""
    rising = math.ceil(steps * warmup)
    if step < rising:
        return step / max(1, rising)
    return max(0.0, (steps - step) / max(1, steps - rising))


def set_rate(groups: Iterable[dict[str, object]], share: float) -> None:
    for group in groups:
        peak = group["peak"]
        assert isinstance(peak, float)
        group["lr"] = peak * share
