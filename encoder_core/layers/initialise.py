"""Fresh weights, in one table.

| parameter                            | value                                                             |
|--------------------------------------|-------------------------------------------------------------------|
| Linear, Embedding and Conv1d weights | normal(0, std) cut at two standard deviations (BERT, modeling.py) |
| free weights (`free.py`)             | the same                                                          |
| LayerNorm weights                    | 1                                                                 |
| differences from another embedding   | 0                                                                 |
| biases                               | 0                                                                 |
"""

import torch
from torch import nn

from encoder_core.layers.embeddings import DifferenceEmbedding
from encoder_core.layers.free import IntoHeads, OutOfHeads, Weights


@torch.no_grad()
def initialise(model: nn.Module, std: float = 0.02) -> None:
    """Set every parameter of `model` by the table above, drawing from torch's default generator.

    Tied parameters are drawn once. Raises TypeError for a module that owns parameters and is not in the
    table.
    """
    done: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in done:
                continue
            done.add(id(parameter))
            _set(module, name, parameter, std)


def _set(module: nn.Module, name: str, parameter: nn.Parameter, std: float) -> None:
    if name == "bias" or isinstance(module, DifferenceEmbedding):
        nn.init.zeros_(parameter)
    elif isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d | Weights | IntoHeads | OutOfHeads):
        nn.init.trunc_normal_(parameter, std=std, a=-2 * std, b=2 * std)
    elif isinstance(module, nn.LayerNorm):
        nn.init.ones_(parameter)
    else:
        raise TypeError(f"no initial value is defined for {name} of {type(module).__name__}")
