"""A model trained with muP is exported as any other: transformers computes its logits, and no multiplier is left."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForMaskedLM

from data_service.store.open import open_store
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.deberta import DebertaConfig
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.layers.initialise import initialise
from encoder_core.layers.sizes import Mup
from encoder_core.objectives.compose import compose
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.mup import mup_scales
from encoder_core.optim.adamw import AdamW
from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.settings import AdamWConfig
from encoder_core.optim.updates import set_update
from tests.support.models.parity import assert_close, make_batch, pad
from tests.support.models.written import export_model

SHAPE: dict[str, Any] = {
    "layers": 2,
    "hidden": 48,
    "heads": 6,
    "feed_forward": 80,
    "max_length": 40,
    "vocab": 101,
}
MUP = Mup(hidden=16, feed_forward=32)
CONFIGS: dict[str, ModelConfig] = {
    "bert": BertConfig(**SHAPE, mup=MUP),
    "deberta": DebertaConfig(**SHAPE, mup=MUP, mask_decoder="plain"),
    "modernbert": ModernBertConfig(**SHAPE, mup=MUP, local_attention=8),
    "electra": ElectraConfig(**SHAPE, mup=MUP, embedding=48),
    "eurobert": EuroBertConfig(**SHAPE, mup=MUP),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_export_has_the_logits_that_were_trained(name: str, tmp_path: Path) -> None:
    config, terms = CONFIGS[name], {"mlm": MlmConfig()}
    torch.manual_seed(0)
    model: Any = compose(config, terms)
    scales = mup_scales(config, terms)
    initialise(model, 0.1, "normal", {name: scale.fresh for name, scale in scales.items()})
    rates = {name: scale.rate for name, scale in scales.items()}
    optimizer = AdamW(parameter_groups(model, 0.1, rates=rates), AdamWConfig(lr=1e-2))
    batch = make_batch([17, 40, 3, 1, 28], config.vocabulary_size)
    for step in range(3):
        optimizer.zero_grad()
        model(batch).terms[0].loss_sum.backward()
        set_update(optimizer, lr=1e-2, count=step + 1)
        optimizer.step()
    model.eval()

    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    export_model(parameters.__getitem__, config, {}, open_store(str(tmp_path / "model")))
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path / "model").eval()
    padded = pad(batch, config.pad_id)
    given = {"input_ids": padded.input_ids, "attention_mask": padded.attention_mask}
    with torch.no_grad():
        expected = padded.flat(theirs(**given).logits)[batch.target_positions]
        assert_close(model.logits(batch), expected)
