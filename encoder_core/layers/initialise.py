"""Initial weights by one table (`initialise`), and modules on the meta device for names and shapes only (`on_meta`).

| parameter                            | value                                              |
|--------------------------------------|----------------------------------------------------|
| Linear, Embedding and Conv1d weights | drawn                                              |
| Weights, IntoHeads, OutOfHeads       | drawn                                              |
| ScaledLinear weights                 | drawn, std times their scale                       |
| XLNet's attention biases             | drawn (zihangdai/xlnet, modeling.py)               |
| an embedding's row of padding        | 0, where it has one (fairseq, init_bert_params)    |
| LayerNorm and RMSNorm weights        | 1                                                  |
| differences from another embedding   | 0                                                  |
| other biases                         | 0                                                  |

Drawn: from normal(0, std), or from that normal truncated at two standard deviations, which has a standard deviation of
0.88 std. The truncated one is TensorFlow's truncated_normal_initializer (google-research/bert, albert, electra). XLNet
and the families written in PyTorch use the plain one. If the official code names no initializer (ELECTRA's projection
of the embeddings and its last layer, XLNet's mask embedding), TensorFlow uses Glorot's; here the weights are drawn like
the rest of the model.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from encoder_core.layers.encoder import DifferenceEmbedding
from encoder_core.layers.parameters import AttentionBias, IntoHeads, OutOfHeads, ScaledLinear, Weights
from encoder_core.layers.sizes import Initializer


@contextmanager
def on_meta() -> Iterator[None]:
    """Build modules on the meta device inside the block."""
    with _SkipNormalDraws(), torch.device("meta"):
        yield


class _SkipNormalDraws(TorchFunctionMode):
    """Skips `nn.init.normal_`, which on the meta device only imports torch's compiler, and takes a second."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.init.normal_:
            return kwargs["tensor"]
        return func(*args, **(kwargs or {}))


_NO_FACTORS: Mapping[str, float] = MappingProxyType({})


@torch.no_grad()
def initialise(
    model: nn.Module,
    std: float = 0.02,
    initializer: Initializer = "truncated_normal",
    factors: Mapping[str, float] = _NO_FACTORS,
) -> None:
    """Set every parameter of `model` by the module's table, drawing from torch's default generator.

    Tied parameters are drawn once.

    Args:
        factors: factors of the table's values by parameter name (`objectives/modules/mup.py`); 1 if missing.

    Raises:
        TypeError: a module with parameters is not in the table.
    """
    done: set[int] = set()
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in done:
                continue
            done.add(id(parameter))
            factor = factors.get(f"{prefix}.{name}" if prefix else name, 1.0)
            _initialise_parameter(
                module, name, parameter, lambda p, scale: _draw_normal(p, std * scale, initializer), factor
            )


def _initialise_parameter(
    module: nn.Module,
    name: str,
    parameter: nn.Parameter,
    draw: Callable[[nn.Parameter, float], None],
    factor: float,
) -> None:
    if (name == "bias" and not isinstance(module, AttentionBias)) or isinstance(module, DifferenceEmbedding):
        nn.init.zeros_(parameter)
    elif isinstance(module, _RANDOMLY_INITIALISED):
        draw(parameter, factor * (module.scale if isinstance(module, ScaledLinear) else 1.0))
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            nn.init.zeros_(parameter[module.padding_idx])
    elif isinstance(module, nn.LayerNorm | nn.RMSNorm):
        nn.init.constant_(parameter, factor)
    else:
        raise TypeError(f"no initial value is defined for {name} of {type(module).__name__}")


_RANDOMLY_INITIALISED = (nn.Linear, nn.Embedding, nn.Conv1d, Weights, IntoHeads, OutOfHeads, AttentionBias)


def _draw_normal(parameter: nn.Parameter, std: float, initializer: Initializer) -> None:
    if initializer == "normal":
        nn.init.normal_(parameter, std=std)
    else:
        nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)
