"""Masked language modelling as the trainer sees it: sums, counts, and nothing lost on an empty batch."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from encoder_core.batch import Batch
from encoder_core.errors import ModelError
from encoder_core.families.roberta import RobertaConfig
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.objectives.modules.network import masked_language_model
from tests.support.models.parity import make_batch, random_weights

CONFIG = RobertaConfig(layers=2, hidden=16, heads=2, feed_forward=32, max_length=24, vocab=50)


def model() -> MultitaskModel:
    return random_weights(masked_language_model(CONFIG)).double().eval()


def test_sums_are_the_literal_formula() -> None:
    network, batch = model(), make_batch([5, 24, 9], 50)
    outcome = network(batch)
    log_p = F.log_softmax(network.logits(batch), -1)
    expected = -sum(log_p[i, target] for i, target in enumerate(batch.target_ids.tolist()))
    assert [term.name for term in outcome.terms] == ["mlm"]
    torch.testing.assert_close(outcome.terms[0].loss_sum, expected)
    assert outcome.terms[0].targets == batch.target_ids.numel()
    assert network.target_counts(batch) == {"mlm": batch.target_ids.numel()}
    assert outcome.metrics["mlm_correct"] == (log_p.argmax(-1) == batch.target_ids).sum()


def test_rows_apart_sum_to_rows_together() -> None:
    network = model()
    together = make_batch([5, 24], 50, share=0.5)
    split = int((together.target_positions < 5).sum())
    first = replace(
        together,
        tokens=together.tokens[:5],
        positions=together.positions[:5],
        cu_seqlens=together.cu_seqlens[:2],
        max_length=5,
        target_positions=together.target_positions[:split],
        target_ids=together.target_ids[:split],
    )
    second = replace(
        together,
        tokens=together.tokens[5:],
        positions=together.positions[5:],
        cu_seqlens=together.cu_seqlens[1:] - 5,
        target_positions=together.target_positions[split:] - 5,
        target_ids=together.target_ids[split:],
    )
    apart = network(first).terms[0].loss_sum + network(second).terms[0].loss_sum
    torch.testing.assert_close(apart, network(together).terms[0].loss_sum)


def no_rows() -> Batch:
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(none, torch.zeros(1, dtype=torch.int32), 0, none, none, none)


def no_targets() -> Batch:
    none = torch.zeros(0, dtype=torch.int64)
    return replace(make_batch([3], 50), target_positions=none, target_ids=none)


@pytest.mark.parametrize("batch", [no_rows(), no_targets()], ids=["no_rows", "no_targets"])
@pytest.mark.parametrize("training", [True, False])
def test_an_idle_batch_reaches_every_parameter(batch: Batch, training: bool) -> None:
    network = model().train(training)
    outcome = network(batch)
    assert outcome.terms[0].targets == 0
    outcome.terms[0].loss_sum.backward()
    for name, parameter in network.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_the_decoder_is_the_embedding() -> None:
    network = masked_language_model(CONFIG)
    assert network.head.decoder.weight is network.encoder.embeddings.word.weight
    names = [name for name, _ in network.named_parameters()]
    assert "encoder.embeddings.word.weight" in names
    assert "head.decoder.weight" not in names


def test_an_unknown_vocabulary_is_named() -> None:
    with pytest.raises(ModelError, match=r"model\.vocab"):
        masked_language_model(CONFIG.model_copy(update={"vocab": None}))
