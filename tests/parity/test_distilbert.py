"""DistilBERT, which is BERT without token types, against transformers: outputs, loss, gradients, its config.json."""

import pytest
import torch
from transformers import DistilBertConfig as TheirConfig
from transformers import DistilBertForMaskedLM

from encoder_core.errors import ModelError
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import interchange, read_config
from encoder_core.objectives.network import masked_language_model
from tests.support.models.parity import (
    assert_same_masked_gradients,
    assert_same_masked_outputs,
    copy_from,
    copy_into,
    make_batch,
    random_weights,
)

CONFIG = BertConfig(layers=3, hidden=48, heads=4, feed_forward=80, max_length=40, vocab=101, token_types=0)
LENGTHS = [17, 40, 3, 1, 28]


def their_model(config: BertConfig, dtype: torch.dtype) -> DistilBertForMaskedLM:
    return random_weights(DistilBertForMaskedLM(TheirConfig(**interchange(config).fields))).to(dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("direction", ["theirs_to_ours", "ours_to_theirs"])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
def test_same_weights_same_outputs(dtype: torch.dtype, direction: str, activation: str) -> None:
    config = CONFIG.model_copy(update={"activation": activation})
    ours = random_weights(masked_language_model(config)).to(dtype).eval()
    theirs = their_model(config, dtype)
    if direction == "theirs_to_ours":
        copy_from(theirs, ours, interchange(config))
    else:
        copy_into(theirs, ours, interchange(config))
    batch = make_batch([*LENGTHS], config.vocabulary)
    assert_same_masked_outputs(ours, theirs, batch, config.pad_id)


def test_same_gradients() -> None:
    ours = random_weights(masked_language_model(CONFIG)).double().eval()
    theirs = their_model(CONFIG, torch.float64)
    assert_same_masked_gradients(ours, theirs, make_batch(LENGTHS, CONFIG.vocabulary), CONFIG)


def test_its_configuration_comes_back() -> None:
    assert read_config(TheirConfig(**interchange(CONFIG).fields).to_dict()) == CONFIG
    assert interchange(CONFIG, "none").architecture == "DistilBertModel"
    with pytest.raises(ModelError, match="1e-12"):
        interchange(CONFIG.model_copy(update={"layer_norm_eps": 1e-5}))
