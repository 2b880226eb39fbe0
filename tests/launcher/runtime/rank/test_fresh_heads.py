"""A run that continues a model without a head begins at the frequencies' loss, whatever the scale of the embeddings."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import TypeAdapter
from torch import nn
from transformers import AutoModel

from encoder_core.batch import Batch
from encoder_core.families.catalogue import ModelConfig
from encoder_core.objectives.span_boundary import SboConfig
from launcher.runtime.recipe.objective import RecipeObjective
from launcher.runtime.run.inputs import unigram_probabilities
from tests.support.models.parity import make_batch, parameters_of
from tests.support.runs.starts import BERT, MLM, ROBERTA, SPANS, Setting, export, fresh


def headless(setting: Setting, config: ModelConfig, folder: Path, scale: float) -> None:
    """What `AutoModel.save_pretrained` writes: an encoder, its embeddings `scale` times as long, the same function."""
    export(setting.asks(config, RecipeObjective(mlm=MLM), "scratch"), folder / "whole")
    model = AutoModel.from_pretrained(folder / "whole", add_pooling_layer=False)
    with torch.no_grad():
        for table in model.embeddings.children():
            if isinstance(table, nn.Embedding):
                table.weight.mul_(scale)
    model.save_pretrained(folder / "headless")


def drawn_by_frequency(probabilities: np.ndarray, seed: int) -> Batch:
    draw = np.random.default_rng(seed)
    batch = make_batch([40] * 8, len(probabilities), segments=True)
    ids = draw.choice(len(probabilities), len(batch.target_ids), p=probabilities)
    return replace(batch, target_ids=torch.from_numpy(ids))


def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    (term,) = model(batch).terms
    value: torch.Tensor = term.loss_sum / len(batch.target_ids)
    return value


@pytest.mark.long
@pytest.mark.parametrize("scale", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("config", [BERT, ROBERTA], ids=["bert", "roberta"])
def test_a_fresh_head_begins_with_the_frequencies_and_its_loss_falls(
    setting: Setting, tmp_path: Path, config: ModelConfig, scale: float
) -> None:
    headless(setting, config, tmp_path, scale)
    model, start = setting.asks(config, RecipeObjective(mlm=MLM), tmp_path / "headless").begin()
    assert "head.norm.weight" in TypeAdapter(list[str]).validate_python(start.record["fresh"])
    probabilities = unigram_probabilities(setting.run.recipe)
    batches = [drawn_by_frequency(probabilities, seed) for seed in range(25)]
    with torch.no_grad():
        guessed = float(-np.log(probabilities[batches[0].target_ids.numpy()]).mean())
        first = float(loss(model, batches[0]))
    assert first == pytest.approx(guessed, abs=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches:
        now = loss(model.train(), batch)
        guessed = float(-np.log(probabilities[batch.target_ids.numpy()]).mean())
        assert float(now.detach()) < guessed + 0.4
        optimizer.zero_grad()
        now.backward()
        optimizer.step()


def test_a_head_that_is_there_is_left_alone(setting: Setting, tmp_path: Path) -> None:
    exported = parameters_of(export(setting.asks(BERT, RecipeObjective(mlm=MLM), "scratch"), tmp_path))
    model, _ = setting.asks(BERT, RecipeObjective(mlm=SPANS, sbo=SboConfig()), tmp_path).begin()
    found = parameters_of(model)
    assert torch.equal(found["head.norm.weight"], exported["head.norm.weight"])
    assert torch.equal(found["head.decoder.bias"], exported["head.decoder.bias"])
    frequencies = torch.from_numpy(unigram_probabilities(setting.run.recipe)).log().float()
    assert torch.equal(found["boundary_head.decoder.bias"], frequencies)
    assert found["boundary_head.second_norm.weight"].unique().numel() == 1


def test_a_run_from_scratch_is_as_it_was(setting: Setting) -> None:
    gain = fresh(setting.asks(BERT, RecipeObjective(mlm=MLM), "scratch"))["head.norm.weight"]
    assert (gain == 1).all()
