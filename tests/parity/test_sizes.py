"""Every official size, built on the meta device: the same parameters as transformers, near the published count."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForMaskedLM

from encoder_core.families import roberta
from encoder_core.families.build import ModelConfig
from encoder_core.families.hf.interchange import interchange
from encoder_core.objectives.mlm import masked_language_model

SIZES = [
    pytest.param(roberta.BASE, 125e6, id="roberta-base"),
    pytest.param(roberta.LARGE, 355e6, id="roberta-large"),
]


@pytest.mark.parametrize(("config", "published"), SIZES)
def test_count(config: ModelConfig, published: float) -> None:
    with torch.device("meta"):
        ours = masked_language_model(config)
    count = sum(parameter.numel() for parameter in ours.parameters())
    assert count == pytest.approx(published, rel=0.005)

    their = interchange(config)
    with torch.device("meta"):
        theirs = AutoModelForMaskedLM.from_config(AutoConfig.for_model(**their.fields))
    folded = sum(theirs.get_parameter(fold.theirs).numel() for fold in their.table.folds)
    assert count == sum(parameter.numel() for parameter in theirs.parameters()) - folded
    shapes = {name: parameter.shape for name, parameter in theirs.named_parameters()}
    names = their.table.names(their.layers)
    assert {names[name]: parameter.shape for name, parameter in ours.named_parameters()} == {
        name: shape for name, shape in shapes.items() if name in set(names.values())
    }
