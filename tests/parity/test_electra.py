"""ELECTRA's two networks against transformers' two classes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from encoder_core.families.catalogue import hf_format_of
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.interchange import Heads
from tests.support.models.parity import assert_close, assert_same_gradients, make_batch, mean_loss, pad
from tests.support.models.peers import in_both_precisions, peers

SHAPE: dict[str, Any] = {
    "layers": 3,
    "hidden": 48,
    "heads": 4,
    "feed_forward": 80,
    "max_length": 40,
    "vocab": 101,
}
CONFIGS = {
    "projected": ElectraConfig(**SHAPE, embedding=16),
    "projected-tanh": ElectraConfig(**SHAPE, embedding=16, activation="gelu_tanh"),
    "as_wide": ElectraConfig(**SHAPE, embedding=48),
}
LENGTHS = [17, 40, 3, 1, 28]


@in_both_precisions
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
@pytest.mark.parametrize("heads", ["mlm", "rtd"])
def test_same_weights_same_outputs(config: ElectraConfig, heads: Heads, dtype: torch.dtype) -> None:
    """And in fp64, after our weights were copied into theirs, the same gradients."""
    ours, theirs = peers(config, dtype, "ours_to_theirs" if dtype == torch.float64 else "theirs_to_ours", heads)
    batch = make_batch(LENGTHS, config.vocabulary_size, segments=True)
    padded = pad(batch, config.pad_id)
    replaced = torch.zeros_like(batch.tokens, dtype=torch.bool)
    replaced[batch.target_positions] = True
    labels = padded.labels if heads == "mlm" else (padded.labels >= 0).long()

    expected = theirs(
        padded.input_ids,
        attention_mask=padded.attention_mask,
        token_type_ids=padded.token_type_ids,
        labels=labels,
        output_hidden_states=True,
    )
    for state, hidden in zip(list(ours.encoder.states(batch))[1:], expected.hidden_states[1:], strict=True):
        assert_close(state, padded.flat(hidden))
    their_loss = expected.loss
    if heads == "rtd" and dtype == torch.float64:  # theirs takes fp32 labels and returns an fp32 loss
        their_loss = F.binary_cross_entropy_with_logits(padded.flat(expected.logits), replaced.double())
    if heads == "mlm":
        assert_close(ours.logits(batch), padded.flat(expected.logits)[batch.target_positions])
        loss = mean_loss(ours(batch))
    else:
        logits = padded.flat(expected.logits)
        assert_close(ours.logits(batch), logits)
        sums = ours(batch, replaced)
        assert sums.flagged == (logits > 0).sum()
        assert sums.found == ((logits > 0) & replaced).sum()
        assert sums.correct == ((logits > 0) == replaced).sum()
        assert sums.replaced == replaced.sum()
        loss = sums.loss_sum / batch.tokens.numel()
    assert_close(loss, their_loss)

    if dtype == torch.float64:
        assert_same_gradients(ours, theirs, hf_format_of(config, heads), loss, their_loss)
