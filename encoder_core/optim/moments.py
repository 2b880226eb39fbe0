"""The state of AdamW and LAMB: two moments per tensor, under the names that checkpoints store."""

from collections.abc import MutableMapping

import torch
from torch import Tensor

MOMENTS = ("exp_avg", "exp_avg_sq")


def moments(state: MutableMapping[Tensor, dict[str, Tensor]], p: Tensor) -> dict[str, Tensor]:
    """The moments of `p` by name, zeros before its first update."""
    own = state[p]
    for name in MOMENTS:
        if name not in own:
            own[name] = torch.zeros_like(p, memory_format=torch.preserve_format)
    return own
