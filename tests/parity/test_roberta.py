"""RoBERTa against transformers: the same weights give the same hidden states, logits, loss and gradients."""

import pytest
import torch

from encoder_core.families.roberta import RobertaConfig
from encoder_core.layers.attention import Attend, automatic
from tests.support.models.parity import (
    assert_same_masked_gradients,
    assert_same_masked_outputs,
    make_batch,
)
from tests.support.models.peers import Direction, in_both_directions, in_both_precisions, peers
from tests.support.models.plain_attention import reference

CONFIG = RobertaConfig(layers=3, hidden=48, heads=4, feed_forward=80, max_length=40, vocab=101)
LENGTHS = [17, 40, 3, 1, 28]


@pytest.mark.default_cases(16)
@in_both_precisions
@in_both_directions
@pytest.mark.parametrize("attend", [automatic, reference])
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh"])
@pytest.mark.parametrize("pad_id", [0, 1, 7])
def test_same_weights_same_outputs(
    dtype: torch.dtype, direction: Direction, attend: Attend, activation: str, pad_id: int
) -> None:
    config = CONFIG.model_copy(update={"activation": activation, "pad_id": pad_id})
    ours, theirs = peers(config, dtype, direction, attend)
    batch = make_batch([*LENGTHS], config.vocabulary)
    assert_same_masked_outputs(ours, theirs, batch, pad_id)


def test_same_gradients() -> None:
    ours, theirs = peers(CONFIG, torch.float64)
    assert_same_masked_gradients(ours, theirs, make_batch(LENGTHS, CONFIG.vocabulary), CONFIG)
