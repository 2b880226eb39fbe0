"""Masked language modelling as the trainer sees it: sums and counts."""

import pytest
import torch
import torch.nn.functional as F

from encoder_core.errors import ModelError
from encoder_core.families.roberta import RobertaConfig
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.network import masked_language_model
from tests.support.models.parity import make_batch
from tests.support.models.terms import SIZE, trained_by

CONFIG = RobertaConfig(**SIZE)


def test_sums_are_the_literal_formula() -> None:
    network, batch = trained_by(CONFIG, MlmConfig()), make_batch([5, 24, 9], 50)
    outcome = network(batch)
    log_p = F.log_softmax(network.logits(batch), -1)
    expected = -sum(log_p[i, target] for i, target in enumerate(batch.target_ids.tolist()))
    assert [term.name for term in outcome.terms] == ["mlm"]
    torch.testing.assert_close(outcome.terms[0].loss_sum, expected)
    assert outcome.terms[0].targets == batch.target_ids.numel()
    assert network.target_counts(batch) == {"mlm": batch.target_ids.numel()}
    assert outcome.metrics["mlm_correct"] == (log_p.argmax(-1) == batch.target_ids).sum()


def test_the_decoder_is_the_embedding() -> None:
    network = masked_language_model(CONFIG)
    assert network.head.decoder.weight is network.encoder.embeddings.word.weight
    names = [name for name, _ in network.named_parameters()]
    assert "encoder.embeddings.word.weight" in names
    assert "head.decoder.weight" not in names


def test_an_unknown_vocabulary_is_named() -> None:
    with pytest.raises(ModelError, match=r"model\.vocab"):
        masked_language_model(CONFIG.model_copy(update={"vocab": None}))
