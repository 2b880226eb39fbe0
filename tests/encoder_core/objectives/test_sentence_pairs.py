"""The pair term beside masked language modelling: what it sums, and rows without labels."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from encoder_core.families.bert import BertConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.objectives.sentence_pairs import NspConfig, SopConfig
from tests.support.models.parity import make_batch
from tests.support.models.terms import SIZE, assert_reaches_every_parameter, trained_by

CONFIG = BertConfig(**SIZE)


def test_sums_are_the_literal_formula() -> None:
    model = trained_by(CONFIG, MlmConfig(), NspConfig())
    batch = make_batch([9, 30, 4], 50, segments=True)
    outcome = model(batch)
    mlm, nsp = outcome.terms
    hidden = model.encoder(batch)
    total = torch.zeros((), dtype=torch.float64)
    assert batch.pair_labels is not None
    for first, label in zip((0, 9, 39), batch.pair_labels.tolist(), strict=True):
        pooled = torch.tanh(model.pair_head.pooler(hidden[first]))
        total = total - model.pair_head.classifier(pooled).log_softmax(0)[label]
    torch.testing.assert_close(nsp.loss_sum, total)
    expected = F.cross_entropy(model.logits(batch), batch.target_ids, reduction="sum")
    torch.testing.assert_close(mlm.loss_sum, expected)
    assert model.target_counts(batch) == {"mlm": mlm.targets, "nsp": 3}
    assert nsp.targets == 3


def test_the_second_segment_changes_the_outcome() -> None:
    model = trained_by(CONFIG, MlmConfig(), SopConfig())
    batch = make_batch([9, 30], 50, segments=True)
    assert batch.segments is not None
    swapped = replace(batch, segments=1 - batch.segments)
    assert model(batch).terms[1].loss_sum != model(swapped).terms[1].loss_sum


def test_rows_without_labels_have_no_pair_term_but_a_whole_graph() -> None:
    model = trained_by(CONFIG, MlmConfig(), SopConfig())
    batch = make_batch([9, 30], 50)
    outcome = model(batch)
    assert [(term.name, term.targets) for term in outcome.terms] == [
        ("mlm", batch.target_ids.numel()),
        ("sop", 0),
    ]
    assert outcome.terms[1].loss_sum == 0
    assert_reaches_every_parameter(model, batch)


@pytest.mark.heavy
@pytest.mark.parametrize("family", [DebertaConfig, DebertaV2Config])
def test_debertas_masks_go_through_its_decoder_and_its_pairs_through_the_last_layer(
    family: type[DebertaConfig | DebertaV2Config],
) -> None:
    config = family(**SIZE | {"layers": 3})
    model = trained_by(config, MlmConfig(), SopConfig())
    alone = masked_language_model(config).double().eval()
    alone.load_state_dict({name: p for name, p in model.state_dict().items() if "pair_head" not in name})
    batch = make_batch([9, 30, 4], 50, segments=True)
    mlm, sop = model(batch).terms
    torch.testing.assert_close(mlm.loss_sum, alone(batch).terms[0].loss_sum)
    torch.testing.assert_close(model.logits(batch), alone.logits(batch))
    assert batch.pair_labels is not None
    scores = model.pair_head.logits(model.encoder(batch)[[0, 9, 39]])
    torch.testing.assert_close(sop.loss_sum, F.cross_entropy(scores, batch.pair_labels, reduction="sum"))
    assert model.logits(batch).sub(model.head.logits(model.encoder(batch)[batch.target_positions])).abs().max() > 1e-3
