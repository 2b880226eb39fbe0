"""Maximal update parametrisation (muP): initial weights and learning rates as functions of width (Yang et al. 2022,
"Tensor Programs V", arXiv 2203.03466, table 8; for Muon Yang, Simon and Bernstein 2023, arXiv 2310.17813, condition 1).

With muP, the best learning rate does not depend on the model's width. A model names a base, the same model in another
width, whose factors are all 1. `k` is a parameter's number of inputs in the model over that in the base:

| parameter                                      | initial std  | AdamW's rate | Muon's rate                          |
|------------------------------------------------|--------------|--------------|--------------------------------------|
| matrix from a width to a width                 | k^-1/2       | 1 / k        | k^-1/2 if both grow alike           |
| matrix from a width to a fixed number (labels) | 1 / k        | 1 / k        | -                                    |
| embedding, bias, norm                          | 1            | 1            | -                                    |
| norm before a decoder tied to embeddings       | 1 / k        | 1 / k        | -                                    |

**The output multiplier.** Table 8 multiplies logits by 1 / k, because a tied decoder shares the embeddings' initial
values and learning rate. Here the network has no multiplier m; the norm before the decoder replaces it. With the norm's
gain g and bias b, W (m (g * x + b)) equals W (m g * x + m b): so g and b begin m times as large and, because the size
of Adam's steps does not depend on that of gradients, have m times the learning rate. So checkpoints, exports and
kernels do not depend on muP, and transformers computes the same logits. A tied decoder without a norm before it (XLM,
XLNet, BART) is refused. A decoder that is not tied counts as a matrix to a fixed number.

**Attention** divides scores by the root of the head width, not by the head width as muP does. Heads are as wide as the
base's, as in all sizes of BERT, so the two differ by a constant factor.

**Weight decay** is the learning rate times `weight_decay`. muP keeps this product, so `encoder_core/optim/groups.py`
divides `weight_decay` by the factor of the learning rate.
"""

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor, nn

from encoder_core.errors import ModelError
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.mup import mup_base
from encoder_core.heads.prediction import MaskedLanguageModelHead, SpanBoundaryHead
from encoder_core.layers.initialise import on_meta
from encoder_core.layers.parameters import JoinedLinear
from encoder_core.objectives.compose import compose
from encoder_core.objectives.term import TermConfig
from encoder_core.optim.muon import rms_scale


class MupFactors(NamedTuple):
    """The factors of a parameter's initial values and learning rates, relative to the base.

    Attributes:
        fresh: factor of a matrix's initial standard deviation, or of a norm's initial gain.
        rate: factor of AdamW's learning rate.
        muon_rate: factor of Muon's learning rate.
    """

    fresh: float
    rate: float
    muon_rate: float


class _Fans(NamedTuple):
    """A matrix's numbers of inputs and outputs; for the norm before a tied decoder, the decoder's inputs and None."""

    inputs: int
    outputs: int | None


def mup_scales(model: ModelConfig, terms: Mapping[str, TermConfig]) -> dict[str, MupFactors]:
    """Return the factors by parameter name, for the module that trains `terms` on `model`; missing parameters have
    factor 1. Without `model.mup` the result is empty.

    Raises:
        ModelError: muP is not supported for the model, the base is not valid, or the size of the vocabulary is unknown.
    """
    if model.mup is None:
        return {}
    with on_meta():
        own, base = _scaled_fans(compose(model, terms)), _scaled_fans(compose(mup_base(model), terms))
    if own.keys() != base.keys():
        raise ModelError(
            f"the model and its base of width {model.mup.hidden} differ in more than width: only one of them has "
            f"{', '.join(sorted(own.keys() ^ base.keys()))}",
            remedy="set model.mup.hidden to a width at which the base projects its embeddings where the model does",
        )
    return {name: _mup_factors(its, base[name]) for name, its in own.items()}


def _mup_factors(own: _Fans, base: _Fans) -> MupFactors:
    k = own.inputs / base.inputs
    if own.outputs is None or base.outputs is None:
        return MupFactors(1 / k, 1 / k, 1 / k)
    to_fixed = own.outputs == base.outputs
    return MupFactors(1 / k if to_fixed else k**-0.5, 1 / k, _muon_rate_factor(own) / _muon_rate_factor(base))


def _muon_rate_factor(fans: _Fans) -> float:
    """Return a number to which Muon's learning rate must be proportional, so that updates change outputs equally at any
    width.

    The spectral norm of an update must be proportional to sqrt(outputs / inputs) (condition 1); that of Muon's update
    is `rms_scale` times the learning rate.
    """
    assert fans.outputs is not None
    return math.sqrt(fans.outputs / fans.inputs) / rms_scale(fans.outputs, fans.inputs)


def _scaled_fans(model: nn.Module) -> dict[str, _Fans]:
    """Return by name the inputs and outputs of the parameters that muP scales."""
    names = {id(p): name for name, p in model.named_parameters()}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found = {
        names[id(parameter)]: fans
        for module in model.modules()
        for parameter, fans in _scaled_parameters(module, embeddings)
    }
    return {name: found[name] for name in names.values() if name in found}


def _scaled_parameters(module: nn.Module, embeddings: set[int]) -> Iterator[tuple[Tensor, _Fans]]:
    """Yield what muP scales: a module's matrix, or a head's norm. `embeddings`: Python ids of embedding tables."""
    if isinstance(module, MaskedLanguageModelHead | SpanBoundaryHead):
        if id(module.decoder.weight) in embeddings and module.decoder_norm is not None:
            fans = _Fans(module.decoder.in_features, None)
            yield from ((parameter, fans) for parameter in module.decoder_norm.parameters())
    elif isinstance(module, nn.Linear | nn.Conv1d) and id(module.weight) not in embeddings:
        yield module.weight, _matrix_fans(module)


def _matrix_fans(module: nn.Linear | nn.Conv1d) -> _Fans:
    """Return a module's inputs and outputs; the outputs of a joined Linear are those of its first matrix."""
    match module:
        case JoinedLinear():
            return _Fans(module.in_features, module.joined.times * module.joined.rows[0])
        case nn.Linear():
            return _Fans(module.in_features, module.out_features)
        case _:
            return _Fans(module.in_channels * module.kernel_size[0], module.out_channels)
