"""A network beside transformers' class of the same form, both with the weights of one."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import pytest
import torch
import transformers
from torch import Tensor

from encoder_core.families.catalogue import ModelConfig, hf_format_of
from encoder_core.families.interchange import Heads
from encoder_core.objectives.modules.network import build_network
from tests.support.models.parity import copy_from, copy_into, random_weights

in_both_precisions = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])


def peers(
    config: ModelConfig,
    dtype: torch.dtype,
    direction: Literal["theirs_to_ours", "ours_to_theirs"] = "theirs_to_ours",
    heads: Heads = "mlm",
    **fields: object,
) -> tuple[Any, Any]:
    """Ours and theirs, whose configuration has the fields that an export writes, and `fields`."""
    their = hf_format_of(config, heads)
    described = transformers.AutoConfig.for_model(**their.fields | fields)
    theirs = random_weights(getattr(transformers, str(their.architecture))(described)).to(dtype).eval()
    ours = random_weights(build_network(config, heads), seed=1).to(dtype).eval()
    (copy_from if direction == "theirs_to_ours" else copy_into)(theirs, ours, their)
    return ours, theirs


@contextmanager
def unrounded_norm(norm: type[torch.nn.Module]) -> Iterator[None]:
    """transformers computes RMSNorm in fp32, in fp64 models too; here by the same formula without that rounding."""
    theirs = norm.forward

    def chosen(self: Any, states: Tensor) -> Tensor:
        if states.dtype != torch.float64:
            rounded: Tensor = theirs(self, states)
            return rounded
        scale = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        exact: Tensor = self.weight * states * scale
        return exact

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(norm, "forward", chosen)
        yield
