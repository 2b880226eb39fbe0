"""BERT and ALBERT against transformers with both heads, and with token types. Masked tokens alone: test_masked.py."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForPreTraining

from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig, interchange
from encoder_core.objectives.network import masked_language_model_with_pairs
from tests.support.models.parity import (
    GRADIENT_TOLERANCE,
    assert_close,
    copy_from,
    copy_into,
    make_batch,
    pad,
    random_weights,
)
from tests.support.models.peers import in_both_precisions

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
}
PAIRS: dict[str, PairConfig] = {"bert": NspConfig(), "albert": SopConfig()}


def both(config: ModelConfig, dtype: torch.dtype) -> tuple[Any, Any]:
    its = interchange(config, "mlm_pair")
    theirs = AutoModelForPreTraining.from_config(AutoConfig.for_model(**its.fields))
    assert type(theirs).__name__ == its.architecture
    ours = masked_language_model_with_pairs(config, TASKS[config.family])
    return tuple(random_weights(model).to(dtype).eval() for model in (ours, theirs))  # type: ignore[return-value]


def their_inputs(config: ModelConfig) -> tuple[Any, Any, dict[str, Any]]:
    batch = make_batch(LENGTHS, config.vocabulary, segments=True)
    padded = pad(batch, config.pad_id)
    name = "next_sentence_label" if config.family == "bert" else "sentence_order_label"
    inputs: dict[str, Any] = {
        "input_ids": padded.input_ids,
        "attention_mask": padded.attention_mask,
        "token_type_ids": padded.token_type_ids,
        "labels": padded.labels,
        name: batch.pair_labels,
    }
    return batch, padded, inputs


@in_both_precisions
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_same_weights_same_outputs(config: ModelConfig, dtype: torch.dtype) -> None:
    ours, theirs = both(config, dtype)
    copy_from(theirs, ours, interchange(config, "mlm_pair"))
    batch, padded, inputs = their_inputs(config)
    expected = theirs(**inputs, output_hidden_states=True)
    states = list(ours.encoder.states(batch))
    for state, hidden in zip(states[1:], expected.hidden_states[1:], strict=True):
        assert_close(state, padded.flat(hidden))
    assert_close(ours.logits(batch), padded.flat(expected.prediction_logits)[batch.target_positions])
    pair = expected.seq_relationship_logits if config.family == "bert" else expected.sop_logits
    first = states[-1][batch.cu_seqlens[:-1].long()]
    assert_close(ours.pair_head.logits(first), pair)
    correct = (pair.argmax(-1) == batch.pair_labels).sum()
    assert ours(batch).metrics[f"{TASKS[config.family]}_correct"] == correct
    assert_close(sum(term.weight * term.loss_sum / term.targets for term in ours(batch).terms), expected.loss)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_same_gradients(config: ModelConfig) -> None:
    ours, theirs = both(config, torch.float64)
    their = interchange(config, "mlm_pair")
    copy_into(theirs, ours, their)
    batch, _, inputs = their_inputs(config)
    theirs(**inputs).loss.backward()
    sum(term.loss_sum / term.targets for term in ours(batch).terms).backward()
    their_parameters, names = dict(theirs.named_parameters()), their.table.names(their.layers)
    for name, parameter in ours.named_parameters():
        expected = their_parameters[names[name]].grad
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=GRADIENT_TOLERANCE)
