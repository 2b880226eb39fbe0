"""BERT and ALBERT against transformers, with token types, both heads and lengths mixed."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForMaskedLM, AutoModelForPreTraining

from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig, hf_format_of
from encoder_core.families.interchange import Heads
from encoder_core.layers.attention import AttentionKernel, SelfAttention, attend_with_best_kernel
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.multitask import multitask_model
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.objectives.sentence_pairs import NspConfig, PairConfig, SopConfig
from tests.support.models.parity import (
    GRADIENT_TOLERANCE,
    assert_close,
    copy_from,
    copy_into,
    make_batch,
    pad,
    random_weights,
)
from tests.support.models.plain_attention import reference

SHAPE: dict[str, Any] = {
    "layers": 4,
    "hidden": 48,
    "heads": 4,
    "feed_forward": 80,
    "max_length": 40,
    "vocab": 101,
}
LENGTHS = [17, 40, 3, 1, 28]

CONFIGS = {
    "bert": BertConfig(**SHAPE),
    "bert-tanh": BertConfig(**SHAPE, activation="gelu_tanh", token_types=3),
    "albert": AlbertConfig(**SHAPE, embedding=16),
    "albert-groups": AlbertConfig(**SHAPE, embedding=16, groups=3, activation="gelu_tanh"),
    "albert-rounded-groups": AlbertConfig(**SHAPE | {"layers": 18}, embedding=16, groups=14),
}
PAIRS: dict[str, PairConfig] = {"bert": NspConfig(), "albert": SopConfig()}


def our_model(
    config: ModelConfig, heads: Heads, dtype: torch.dtype, attend: AttentionKernel = attend_with_best_kernel
) -> Any:
    if heads == "mlm":
        model: nn.Module = masked_language_model(config)
    else:
        model = multitask_model(config, [MlmConfig(), PAIRS[config.family]])
    for part in model.modules():
        if isinstance(part, SelfAttention):
            part.attend = attend
    return random_weights(model).to(dtype).eval()


def their_model(config: ModelConfig, heads: Heads, dtype: torch.dtype) -> Any:
    described = AutoConfig.for_model(**hf_format_of(config, heads).fields)
    factory = AutoModelForMaskedLM if heads == "mlm" else AutoModelForPreTraining
    model = factory.from_config(described)
    assert type(model).__name__ == hf_format_of(config, heads).architecture
    return random_weights(model).to(dtype).eval()


def their_inputs(config: ModelConfig, heads: Heads) -> tuple[Any, Any, dict[str, Any]]:
    batch = make_batch(LENGTHS, config.vocabulary_size, segments=True)
    padded = pad(batch, config.pad_id)
    inputs: dict[str, Any] = {
        "input_ids": padded.input_ids,
        "attention_mask": padded.attention_mask,
        "token_type_ids": padded.token_type_ids,
        "labels": padded.labels,
    }
    if heads == "mlm_pair":
        name = "next_sentence_label" if config.family == "bert" else "sentence_order_label"
        inputs[name] = batch.pair_labels
    return batch, padded, inputs


@pytest.fixture(params=[torch.float32, torch.float64], ids=["fp32", "fp64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.default_cases(16)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("heads", ["mlm", "mlm_pair"])
@pytest.mark.parametrize("direction", ["theirs_to_ours", "ours_to_theirs"])
@pytest.mark.parametrize("attend", [attend_with_best_kernel, reference])
def test_same_weights_same_outputs(
    config: ModelConfig, heads: Heads, direction: str, attend: AttentionKernel, dtype: torch.dtype
) -> None:
    ours, theirs = our_model(config, heads, dtype, attend), their_model(config, heads, dtype)
    copy = copy_from if direction == "theirs_to_ours" else copy_into
    copy(theirs, ours, hf_format_of(config, heads))
    batch, padded, inputs = their_inputs(config, heads)

    expected = theirs(**inputs, output_hidden_states=True)
    states = list(ours.encoder.states(batch))
    for state, hidden in zip(states[1:], expected.hidden_states[1:], strict=True):
        assert_close(state, padded.flat(hidden))
    their_logits = expected.logits if heads == "mlm" else expected.prediction_logits
    assert_close(ours.logits(batch), padded.flat(their_logits)[batch.target_positions])
    if heads == "mlm_pair":
        pair = expected.seq_relationship_logits if config.family == "bert" else expected.sop_logits
        first = states[-1][batch.cu_seqlens[:-1].long()]
        assert_close(ours.pair_head.logits(first), pair)
        correct = (pair.argmax(-1) == batch.pair_labels).sum()
        assert ours(batch).metrics[f"{PAIRS[config.family].name}_correct"] == correct
    assert_close(sum(term.weight * term.loss_sum / term.targets for term in ours(batch).terms), expected.loss)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("heads", ["mlm", "mlm_pair"])
def test_same_gradients(config: ModelConfig, heads: Heads) -> None:
    ours, theirs = our_model(config, heads, torch.float64), their_model(config, heads, torch.float64)
    their = hf_format_of(config, heads)
    copy_into(theirs, ours, their)
    batch, _, inputs = their_inputs(config, heads)
    theirs(**inputs).loss.backward()
    sum(term.loss_sum / term.targets for term in ours(batch).terms).backward()
    their_parameters, names = dict(theirs.named_parameters()), their.table.their_names(their.layers)
    for name, parameter in ours.named_parameters():
        expected = their_parameters[names[name]].grad
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=GRADIENT_TOLERANCE)
