"""DistilBERT, which is BERT without token types, against transformers: outputs, loss, gradients, its config.json."""

import pytest
import torch
from transformers import DistilBertConfig as TheirConfig

from encoder_core.errors import ModelError
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import interchange, read_config
from tests.support.models.parity import (
    assert_same_masked_gradients,
    assert_same_masked_outputs,
    make_batch,
)
from tests.support.models.peers import Direction, in_both_directions, in_both_precisions, peers

CONFIG = BertConfig(layers=3, hidden=48, heads=4, feed_forward=80, max_length=40, vocab=101, token_types=0)
LENGTHS = [17, 40, 3, 1, 28]


@in_both_precisions
@in_both_directions
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_same_weights_same_outputs(dtype: torch.dtype, direction: Direction, activation: str) -> None:
    config = CONFIG.model_copy(update={"activation": activation})
    ours, theirs = peers(config, dtype, direction)
    batch = make_batch([*LENGTHS], config.vocabulary)
    assert_same_masked_outputs(ours, theirs, batch, config.pad_id)


def test_same_gradients() -> None:
    ours, theirs = peers(CONFIG, torch.float64)
    assert_same_masked_gradients(ours, theirs, make_batch(LENGTHS, CONFIG.vocabulary), CONFIG)


def test_its_configuration_comes_back() -> None:
    assert read_config(TheirConfig(**interchange(CONFIG).fields).to_dict()) == CONFIG
    assert interchange(CONFIG, "none").architecture == "DistilBertModel"
    with pytest.raises(ModelError, match="1e-12"):
        interchange(CONFIG.model_copy(update={"layer_norm_eps": 1e-5}))
