"""BERT and ALBERT with their heads for pairs against transformers, with token types and lengths mixed. With the masked
head alone: test_masked.py."""

from typing import Any, Literal

import pytest
import torch

from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig, hf_format_of
from tests.support.models.parity import assert_close, assert_same_gradients, make_batch, mean_loss, pad
from tests.support.models.peers import in_both_precisions, peers

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


def their_inputs(config: ModelConfig) -> tuple[Any, Any, dict[str, Any]]:
    batch = make_batch(LENGTHS, config.vocabulary_size, segments=True)
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
@pytest.mark.parametrize("direction", ["theirs_to_ours", "ours_to_theirs"])
def test_same_weights_same_outputs(
    config: ModelConfig, direction: Literal["theirs_to_ours", "ours_to_theirs"], dtype: torch.dtype
) -> None:
    ours, theirs = peers(config, dtype, direction, "mlm_pair")
    batch, padded, inputs = their_inputs(config)
    expected = theirs(**inputs, output_hidden_states=True)
    states = list(ours.encoder.states(batch))
    for state, hidden in zip(states[1:], expected.hidden_states[1:], strict=True):
        assert_close(state, padded.flat(hidden))
    assert_close(ours.logits(batch), padded.flat(expected.prediction_logits)[batch.target_positions])
    pair = expected.seq_relationship_logits if config.family == "bert" else expected.sop_logits
    first = states[-1][batch.cu_seqlens[:-1].long()]
    assert_close(ours.pair_head.logits(first), pair)
    assert ours(batch).metrics["nsp_correct"] == (pair.argmax(-1) == batch.pair_labels).sum()
    assert_close(mean_loss(ours(batch)), expected.loss)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_same_gradients(config: ModelConfig) -> None:
    ours, theirs = peers(config, torch.float64, "ours_to_theirs", "mlm_pair")
    batch, _, inputs = their_inputs(config)
    their = hf_format_of(config, "mlm_pair")
    assert_same_gradients(ours, theirs, their, mean_loss(ours(batch)), theirs(**inputs).loss)
