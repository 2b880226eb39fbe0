"""Condenser against a plain statement of its head."""

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.objectives.compose import compose
from encoder_core.objectives.condenser import CondenserConfig
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.objectives.term import TermConfig
from tests.support.models.parity import make_batch
from tests.support.models.terms import SIZE, assert_same_gradients, families, trained_by

MODELS = families(layers=3)


def built(model: ModelConfig, config: CondenserConfig, *further: TermConfig) -> MultitaskModel:
    return trained_by(model, MlmConfig(), config, *further)


def literal(network: MultitaskModel, model: ModelConfig, batch: Batch, early: int) -> tuple[Tensor, int]:
    """Sum of losses and number of right predictions, row by row."""
    layers: Any = network.condenser
    states = network.states(batch).layers
    ids = dict(zip(batch.target_positions.tolist(), batch.target_ids.tolist(), strict=True))
    loss, correct = torch.zeros((), dtype=torch.float64), 0
    for start, stop in pairwise(batch.cu_seqlens.tolist()):
        x_LH = torch.cat([states[-1][start : start + 1], states[early][start + 1 : stop]])
        for layer in layers:
            x_LH = _layer(layer, x_LH, model)
        for place in range(stop - start):
            if start + place in ids:
                log_p = network.head.logits(x_LH[place : place + 1])[0].log_softmax(0)
                loss = loss - log_p[ids[start + place]]
                correct += int(log_p.argmax() == ids[start + place])
    return loss, correct


def _layer(layer: Any, x_LH: Tensor, model: ModelConfig) -> Tensor:
    """A layer of BERT (section 3), in plain products."""
    attention, heads = layer.attention, model.heads
    q, k, v = (
        F.linear(x_LH, part.weight, part.bias).unflatten(1, (heads, -1)).transpose(0, 1)
        for part in (attention.query, attention.key, attention.value)
    )
    weights = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
    context = (weights @ v).transpose(0, 1).flatten(1)
    y_LH = _norm(layer.attention_norm, x_LH + F.linear(context, attention.output.weight, attention.output.bias))
    inner = F.linear(y_LH, layer.feed_forward.up.weight, layer.feed_forward.up.bias)
    inner = F.silu(inner) if model.activation == "silu" else F.gelu(inner)
    down = layer.feed_forward.down
    return _norm(layer.feed_forward_norm, y_LH + F.linear(inner, down.weight, down.bias))


def _norm(norm: torch.nn.LayerNorm, x_LH: Tensor) -> Tensor:
    centred = x_LH - x_LH.mean(1, keepdim=True)
    scale = (centred.square().mean(1, keepdim=True) + norm.eps).rsqrt()
    return centred * scale * norm.weight + norm.bias


@pytest.mark.parametrize(("early", "read"), [(None, 1), (0, 0), (2, 2)])
@pytest.mark.parametrize("name", MODELS)
def test_sums_and_gradients_are_the_literal_formula(name: str, early: int | None, read: int) -> None:
    network, batch = built(MODELS[name], CondenserConfig(early=early)), make_batch([9, 14, 1, 2], 50)
    expected, correct = literal(network, MODELS[name], batch, read)
    outcome = network(batch)
    term = outcome.terms[1]
    assert (term.name, term.targets) == ("condenser", len(batch.target_ids))
    assert network.target_counts(batch)["condenser"] == term.targets
    torch.testing.assert_close(term.loss_sum, expected, rtol=1e-10, atol=0)
    assert outcome.metrics["condenser_correct"] == correct
    assert_same_gradients(network, term.loss_sum, expected)
    torch.testing.assert_close(network.float()(batch).terms[1].loss_sum.double(), expected, rtol=1e-5, atol=0)


@pytest.mark.long
def test_masked_tokens_are_predicted_as_without_it() -> None:
    """DeBERTa's last layer runs for all tokens beside it, and its mask decoder as before."""
    for model in MODELS.values():
        network, batch = built(model, CondenserConfig()), make_batch([9, 14], 50)
        alone = compose(model, {"mlm": MlmConfig()}).double().eval()
        alone.load_state_dict({name: network.state_dict()[name] for name in alone.state_dict()})
        torch.testing.assert_close(network(batch).terms[0].loss_sum, alone(batch).terms[0].loss_sum, rtol=1e-10, atol=0)


def test_later_layers_reach_the_head_through_the_first_token_only() -> None:
    network, batch = built(MODELS["bert"], CondenserConfig(early=1)), make_batch([9, 14], 50)
    states = network.states(batch)
    late_TH = states.layers[-1]
    late_TH.retain_grad()
    term = network.terms[1].sums(states, batch)
    term.loss_sum.backward()
    assert late_TH.grad is not None
    reached = late_TH.grad.any(1)
    assert torch.equal(reached, batch.positions == 0)


@pytest.mark.parametrize(
    "terms",
    [
        {"condenser": CondenserConfig()},
        {"mlm": MlmConfig(), "condenser": CondenserConfig(), "rtd": ReplacedTokenConfig()},
        {"mlm": MlmConfig(), "condenser": CondenserConfig(early=3)},
    ],
    ids=["alone", "a generator", "the last layer"],
)
def test_what_it_cannot_be_trained_with(terms: dict[str, TermConfig]) -> None:
    with pytest.raises(ModelError):
        compose(RobertaConfig(**SIZE), terms)
