"""What tests of one term of the loss have alike: families in a few numbers, a model of them that several terms train,
and gradients that are compared with those of a literal formula.
"""

from typing import Any

import torch
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.objectives.compose import compose
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.objectives.term import TermConfig
from tests.support.models.parity import random_weights

SIZE: dict[str, Any] = {
    "layers": 2,
    "hidden": 16,
    "heads": 2,
    "feed_forward": 24,
    "max_length": 40,
    "vocab": 50,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}


def families(layers: int = 2) -> dict[str, ModelConfig]:
    """Those that differ in their layers; DeBERTa with its mask decoder and without."""
    size = SIZE | {"layers": layers}
    return {
        "bert": BertConfig(**size),
        "albert": AlbertConfig(**size, embedding=8),
        "deberta": DebertaConfig(**size),
        "deberta_v2": DebertaV2Config(**size, mask_decoder="plain", buckets=8),
        "modernbert": ModernBertConfig(**size, local_attention=8),
        "eurobert": EuroBertConfig(**size, key_value_heads=1),
    }


def trained_by(model: ModelConfig, *terms: TermConfig) -> MultitaskModel:
    """The network in fp64, with random weights and without dropout."""
    module = compose(model, {term.name: term for term in terms})
    assert isinstance(module, MultitaskModel)
    return random_weights(module).double().eval()


def assert_same_gradients(network: MultitaskModel, actual: Tensor, expected: Tensor) -> None:
    """Of two sums of losses, for every parameter; where one does not reach a parameter, the other may reach it by 0."""
    parameters = dict(network.named_parameters())
    found, wanted = (
        torch.autograd.grad(loss, list(parameters.values()), allow_unused=True) for loss in (actual, expected)
    )
    for key, ours, theirs in zip(parameters, found, wanted, strict=True):
        if theirs is None:
            assert ours is None or not ours.any(), key
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9, msg=key)


def assert_reaches_every_parameter(network: MultitaskModel, batch: Batch) -> None:
    """Else ranks that have rows would wait for the gradients of one that has none."""
    network.zero_grad()
    torch.stack([term.loss_sum for term in network(batch).terms]).sum().backward()
    for key, parameter in network.named_parameters():
        assert parameter.grad is not None, key
        assert parameter.grad.isfinite().all(), key
