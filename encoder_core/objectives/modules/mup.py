"""Maximal update parametrisation (muP): fresh weights and learning rates as functions of width (Yang et al. 2022,
"Tensor Programs V", arXiv 2203.03466, table 8; for Muon Yang, Simon and Bernstein 2023, arXiv 2310.17813, condition 1).

With it the best learning rate of a narrow model is that of a wide one. A model states its base, and everything is
relative to that: at the base's own width all factors are 1. `k` is the number of inputs over that in the base, from
the shapes of both:

| parameter                                      | fresh values | AdamW's rate | Muon's rate                          |
|------------------------------------------------|--------------|--------------|--------------------------------------|
| matrix from a width to a width                 | k^-1/2       | 1 / k        | k^-1/2 if both grow alike           |
| matrix from a width to a fixed number (labels) | 1 / k        | 1 / k        | -                                    |
| embedding, bias, norm                          | 1            | 1            | -                                    |
| norm before a decoder tied to embeddings       | 1 / k        | 1 / k        | -                                    |

**The output multiplier.** Table 8 multiplies logits by 1 / k, because a tied decoder cannot be drawn narrower or learn
more slowly than the embeddings that it is. Here the network has no multiplier. The norm before the decoder has a gain
g and a bias b, and W (m (g * x + b)) is W (m g * x + m b): its values begin m times as large and, since Adam's steps do
not depend on the size of gradients, they learn at m times the rate. So checkpoints, exports and kernels know nothing of
muP, and transformers computes the same logits. A decoder that is tied and follows no norm of its own head
(XLM, XLNet, BART) is refused. A decoder with weights of its own is a matrix to a fixed number.

**Attention** divides scores by the root of the head's width, not by the width: heads are as wide as the base's, as in
all sizes of BERT, so the two differ by a constant.

**Weight decay** is AdamW's, the rate times `weight_decay`. muP keeps that product, so `encoder_core/optim/groups.py`
divides by what it multiplies the rate by.
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
    """The factors by which a parameter's fresh values and learning rates differ from the base's.

    Attributes:
        fresh: factor of the standard deviation of a fresh matrix, or of the fresh gain of a norm.
        rate: factor of AdamW's learning rate.
        muon_rate: factor of Muon's learning rate.
    """

    fresh: float
    rate: float
    muon_rate: float


class _Fans(NamedTuple):
    """Inputs and outputs of a matrix; `outputs` None: the norm before a decoder of so many inputs."""

    inputs: int
    outputs: int | None


def mup_scales(model: ModelConfig, terms: Mapping[str, TermConfig]) -> dict[str, MupFactors]:
    """Return the factors of parameters of the module that trains `terms` on `model`, by name; those that are missing
    have 1. Without `model.mup` the result is empty.

    Raises:
        ModelError: muP is not defined for the model, there is no such base, or the size of the vocabulary is unknown.
    """
    if model.mup is None:
        return {}
    with on_meta():
        own, base = _scaled_fans(compose(model, terms)), _scaled_fans(compose(mup_base(model), terms))
    if own.keys() != base.keys():
        raise ModelError(
            f"the model and its base of width {model.mup.hidden} differ in more than width: only one of them has "
            f"{', '.join(sorted(own.keys() ^ base.keys()))}",
            remedy="choose another model.mup.hidden, at which every network projects its embeddings as the model does",
        )
    return {name: _mup_factors(its, base[name]) for name, its in own.items()}


def _mup_factors(own: _Fans, base: _Fans) -> MupFactors:
    k = own.inputs / base.inputs
    if own.outputs is None or base.outputs is None:
        return MupFactors(1 / k, 1 / k, 1 / k)
    to_fixed = own.outputs == base.outputs
    return MupFactors(1 / k if to_fixed else k**-0.5, 1 / k, _muon_rate_factor(own) / _muon_rate_factor(base))


def _muon_rate_factor(fans: _Fans) -> float:
    """Return what Muon's rate is to be proportional to, for a matrix to move outputs as much at any width.

    The spectral norm of an update is to grow as sqrt(outputs / inputs) (condition 1); Muon's is `rms_scale` times
    the rate.
    """
    assert fans.outputs is not None
    return math.sqrt(fans.outputs / fans.inputs) / rms_scale(fans.outputs, fans.inputs)


def _scaled_fans(model: nn.Module) -> dict[str, _Fans]:
    """Return the parameters that muP scales, by name."""
    names = {id(p): name for name, p in model.named_parameters()}
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found = {
        names[id(parameter)]: fans
        for module in model.modules()
        for parameter, fans in _scaled_parameters(module, embeddings)
    }
    return {name: found[name] for name in names.values() if name in found}


def _scaled_parameters(module: nn.Module, embeddings: set[int]) -> Iterator[tuple[Tensor, _Fans]]:
    """Yield the parameters of a module, or of a head's norm, that muP scales."""
    if isinstance(module, MaskedLanguageModelHead | SpanBoundaryHead):
        if id(module.decoder.weight) in embeddings and module.decoder_norm is not None:
            fans = _Fans(module.decoder.in_features, None)
            yield from ((parameter, fans) for parameter in module.decoder_norm.parameters())
    elif isinstance(module, nn.Linear | nn.Conv1d) and id(module.weight) not in embeddings:
        yield module.weight, _matrix_fans(module)


def _matrix_fans(module: nn.Linear | nn.Conv1d) -> _Fans:
    match module:
        case JoinedLinear():
            return _Fans(module.in_features, module.joined.times * module.joined.rows[0])
        case nn.Linear():
            return _Fans(module.in_features, module.out_features)
        case _:
            return _Fans(module.in_channels * module.kernel_size[0], module.out_channels)
