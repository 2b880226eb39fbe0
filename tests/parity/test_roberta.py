"""RoBERTa against transformers: the same weights give the same hidden states, logits, loss and gradients."""

import pytest
import torch
from transformers import RobertaConfig as TheirConfig
from transformers import RobertaForMaskedLM

from encoder_core.families.catalogue import interchange
from encoder_core.families.roberta import RobertaConfig
from encoder_core.layers.attention import Attend, automatic, reference
from encoder_core.objectives.multitask import MultitaskModel
from encoder_core.objectives.network import masked_language_model
from tests.support.models.parity import (
    assert_same_masked_gradients,
    assert_same_masked_outputs,
    copy_from,
    copy_into,
    make_batch,
    random_weights,
)

CONFIG = RobertaConfig(layers=3, hidden=48, heads=4, feed_forward=80, max_length=40, vocab=101)
LENGTHS = [17, 40, 3, 1, 28]


def their_model(config: RobertaConfig, dtype: torch.dtype) -> RobertaForMaskedLM:
    their_config = TheirConfig(**interchange(config).fields)
    return random_weights(RobertaForMaskedLM(their_config)).to(dtype).eval()


def our_model(config: RobertaConfig, dtype: torch.dtype, attend: Attend = automatic) -> MultitaskModel:
    return random_weights(masked_language_model(config, attend=attend)).to(dtype).eval()


@pytest.fixture(params=[torch.float32, torch.float64], ids=["fp32", "fp64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.mark.parametrize("direction", ["theirs_to_ours", "ours_to_theirs"])
@pytest.mark.parametrize("attend", [automatic, reference])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("pad_id", [0, 1, 7])
def test_same_weights_same_outputs(
    dtype: torch.dtype, direction: str, attend: Attend, activation: str, pad_id: int
) -> None:
    config = CONFIG.model_copy(update={"activation": activation, "pad_id": pad_id})
    ours, theirs = our_model(config, dtype, attend), their_model(config, dtype)
    if direction == "theirs_to_ours":
        copy_from(theirs, ours, interchange(config))
    else:
        copy_into(theirs, ours, interchange(config))
    batch = make_batch([*LENGTHS], config.vocabulary)
    assert_same_masked_outputs(ours, theirs, batch, pad_id)


def test_same_gradients() -> None:
    ours, theirs = our_model(CONFIG, torch.float64), their_model(CONFIG, torch.float64)
    assert_same_masked_gradients(ours, theirs, make_batch(LENGTHS, CONFIG.vocabulary), CONFIG)
