"""Starting from a RoBERTa whose config.json has another padding id than its tokenizer: positions begin elsewhere."""

import random
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForMaskedLM

from checkpoints.hf.load import load_pretrained
from data_service.store.open import open_store
from encoder_core.batch import Batch
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.objectives.modules.network import build_network
from launcher.errors import RunError
from launcher.runtime.recipe.objective import RecipeObjective
from tests.support.models.parity import make_batch, pad, parameters_of, random_weights
from tests.support.models.written import export_model
from tests.support.runs.starts import MLM, ROBERTA, Setting

PADS = (0, 2, 3, 7, 41)  # the tokenizer's is 1


def scores(folder: Path, batch: Batch, padding: int) -> Tensor:
    """Those of transformers at the batch's targets; no token of the batch may be `padding`."""
    assert padding not in batch.tokens
    padded = pad(batch, padding)
    with torch.no_grad():
        theirs = AutoModelForMaskedLM.from_pretrained(folder).eval()
        logits = theirs(padded.input_ids, attention_mask=padded.attention_mask).logits
    return padded.flat(logits)[batch.target_positions]


def batch_without(setting: Setting, excluded: set[int]) -> Batch:
    batch = make_batch([12, 40, 3], setting.tokenizer.vocab_size)
    for id_ in excluded:
        batch.tokens[batch.tokens == id_] = 60
    return batch


@pytest.mark.parametrize("padding", random.Random(1).sample(PADS, len(PADS)))
def test_the_model_is_the_same_one(setting: Setting, tmp_path: Path, padding: int) -> None:
    theirs = setting.known(ROBERTA).model_copy(update={"pad_id": padding})
    weights = parameters_of(random_weights(build_network(theirs, "mlm")))
    export_model(weights.__getitem__, theirs, {}, open_store(str(tmp_path / "model")))
    asked = setting.asks(ROBERTA, RecipeObjective(mlm=MLM), tmp_path / "model")
    model, start = asked.begin()
    assert isinstance(model, MultitaskModel)
    assert (start.record["fresh"], start.record["pad_id"]) == ([], padding)

    batch = batch_without(setting, {padding, setting.tokenizer.special.pad})
    expected = scores(tmp_path / "model", batch, padding)
    with torch.no_grad():
        torch.testing.assert_close(model.logits(batch), expected, rtol=0, atol=1e-5)

    ours = setting.known(ROBERTA)
    export_model(
        parameters_of(model).__getitem__,
        ours,
        setting.tokenizer.save_files(),
        open_store(str(tmp_path / "own")),
    )
    found = scores(tmp_path / "own", batch, setting.tokenizer.special.pad)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert load_pretrained(tmp_path / "own").config == ours


@pytest.mark.parametrize("role", ["cls", "sep"])
def test_a_padding_id_that_stands_in_every_row_is_refused(setting: Setting, tmp_path: Path, role: str) -> None:
    padding = getattr(setting.tokenizer.special, role)
    theirs = setting.known(ROBERTA).model_copy(update={"pad_id": padding})
    weights = parameters_of(random_weights(build_network(theirs, "mlm")))
    export_model(weights.__getitem__, theirs, setting.tokenizer.save_files(), open_store(str(tmp_path / "model")))
    with pytest.raises(RunError, match=f"pad_token_id {padding}") as error:
        setting.asks(ROBERTA, RecipeObjective(mlm=MLM), tmp_path / "model").begin()
    assert str(tmp_path / "model") in str(error.value)
