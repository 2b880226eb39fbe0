"""Filling a mask with an exported model by our own code: the same candidates as transformers' pipeline gives."""

from pathlib import Path

import pytest
import torch

from checkpoints.hf.export import export_model
from data_service.errors import TokenizerError
from data_service.store.open import open_store
from data_service.tokenizers.load import load_tokenizer
from encoder_core.errors import ModelError
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.network import masked_language_model
from encoder_core.objectives.plm import permuted_language_model
from launcher.app.cli.demo_path import fill_mask
from tests.support.runs.small_runs import prepare_corpus


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An untrained model with large weights, so that its candidates differ clearly."""
    folder = tmp_path_factory.mktemp("export")
    prepare_corpus(folder)
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    config = RobertaConfig(layers=2, hidden=32, heads=2, feed_forward=64, max_length=64)
    model = masked_language_model(config.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad))
    torch.manual_seed(0)
    initialise(model, std=0.5)
    parameters = dict(model.named_parameters())
    export_model(
        lambda name: parameters[name].detach(),
        config.with_tokenizer(tokenizer.vocab_size, tokenizer.special.pad),
        tokenizer.save_files(),
        open_store(folder / "model"),
    )
    return folder / "model"


@pytest.mark.parametrize(
    "sentence", ["every rank reads its <mask> and the loss falls", "<mask> is lost", "the loss <mask>"]
)
def test_candidates_are_those_of_transformers(exported: Path, sentence: str) -> None:
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(exported), AutoModelForMaskedLM.from_pretrained(exported)
    encoded = tokenizer(sentence, return_tensors="pt")
    with torch.no_grad():
        logits = model.eval()(**encoded).logits
    place = (encoded["input_ids"][0] == tokenizer.mask_token_id).nonzero().item()
    best = logits[0, place].softmax(-1).topk(5)
    guesses = fill_mask(exported, sentence, 5)
    assert [guess.probability for guess in guesses] == pytest.approx(best.values.tolist(), rel=1e-4)
    assert [guess.text for guess in guesses] == [tokenizer.decode([i]) for i in best.indices.tolist()]


def test_a_model_that_predicts_no_masks_says_so(tmp_path: Path, exported: Path) -> None:
    config = XlnetConfig(layers=1, hidden=32, heads=2, feed_forward=64, vocab=320)
    parameters = dict(permuted_language_model(config).named_parameters())
    files = {name: (exported / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    export_model(lambda name: parameters[name].detach(), config, files, open_store(tmp_path), "plm")
    with pytest.raises(ModelError, match=r"\bxlnet\b.*\bhead\b"):
        fill_mask(tmp_path, "the loss <mask>", 3)


@pytest.mark.parametrize("sentence", ["no mask here", "<mask> and <mask>"])
def test_exactly_one_mask(exported: Path, sentence: str) -> None:
    with pytest.raises(TokenizerError, match=r"\bone <mask>"):
        fill_mask(exported, sentence, 3)
