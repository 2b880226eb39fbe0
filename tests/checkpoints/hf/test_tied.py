"""Copies of tied parameters: equal ones and lone ones are read, as transformers reads them; others are refused."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForMaskedLM, AutoModelForPreTraining, AutoModelForSeq2SeqLM

from checkpoints.hf.folder import WEIGHTS
from checkpoints.hf.load import load_pretrained, weights_for
from data_service.store.open import open_store
from encoder_core.errors import ModelError
from encoder_core.families.bart import BartConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import FAMILIES, ModelConfig, hf_format_of
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.interchange import Heads
from encoder_core.objectives.modules.network import build_network
from tests.checkpoints.hf.test_families import CASES as OTHERS
from tests.checkpoints.hf.test_families import SHAPE
from tests.support.models.parity import parameters_of, random_weights
from tests.support.models.written import export_model

WORDS, BIAS = "encoder.embeddings.word.weight", "head.decoder.bias"
CASES: dict[str, tuple[ModelConfig, Heads]] = {
    **{name: case for name, case in OTHERS.items() if case[1] in ("mlm", "mlm_pair", "plm")},
    "distilbert": (BertConfig(**SHAPE, token_types=0), "mlm"),
    "deberta": (DebertaConfig(**SHAPE), "mlm"),
    "deberta-v2": (DebertaV2Config(**SHAPE, buckets=8), "mlm"),
    "eurobert-tied": (EuroBertConfig(**SHAPE, tied_decoder=True), "mlm"),
    "bart": (BartConfig(**SHAPE), "denoise"),
}


def copies(config: ModelConfig, heads: Heads) -> Iterator[tuple[str, str, str]]:
    """Each tied name, the name of what it is a copy of, and our name for both."""
    its = hf_format_of(config, heads)
    for name in its.table.tied:
        ours = BIAS if name.endswith("bias") else WORDS
        yield name, its.table.their_names(its.layers)[ours], ours


def exported(config: ModelConfig, heads: Heads, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Our parameters, and the file's."""
    parameters = parameters_of(random_weights(build_network(config, heads)))
    export_model(parameters.__getitem__, config, {}, open_store(str(folder)), heads)
    return parameters, load_file(folder / WEIGHTS)


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})


def test_no_family_is_missing() -> None:
    families = {config.family for config, heads in CASES.values() if hf_format_of(config, heads).table.tied}
    shape = SHAPE | {"feed_forward": 128}
    assert families >= {config.family for config in (its(**shape) for its in FAMILIES) if config.has_tied_decoder}


@pytest.mark.parametrize(("config", "heads"), CASES.values(), ids=CASES)
def test_one_number_of_a_copy_decides(tmp_path: Path, config: ModelConfig, heads: Heads) -> None:
    parameters, tensors = exported(config, heads, tmp_path)
    draws = random.Random(config.family)
    for copy, original, ours in copies(config, heads):
        assert copy not in tensors, "it is stored once"
        write(tmp_path, tensors | {copy: tensors[original].clone()})
        found = load_pretrained(tmp_path, heads).tensors
        assert all(torch.equal(found[name], parameters[name]) for name in parameters)

        changed = tensors[original].clone()
        place = draws.randrange(changed.numel())
        changed.view(-1)[place] = torch.nextafter(changed.view(-1)[place], torch.tensor(9.0))
        write(tmp_path, tensors | {copy: changed})
        for read in (lambda: load_pretrained(tmp_path, heads), lambda: weights_for(config, tmp_path, heads)):
            with pytest.raises(ModelError) as error:
                read()
            assert copy in str(error.value)
            assert original in str(error.value)
            assert str(tmp_path) in str(error.value)

        write(tmp_path, {name: tensor for name, tensor in tensors.items() if name != original} | {copy: changed})
        assert torch.equal(load_pretrained(tmp_path, heads).tensors[ours], changed)


def test_who_reads_the_encoder_alone_is_not_asked_about_its_head(tmp_path: Path) -> None:
    config = BertConfig(**SHAPE)
    _, tensors = exported(config, "mlm", tmp_path)
    write(tmp_path, tensors | {"cls.predictions.decoder.weight": torch.zeros(3)})
    assert WORDS in weights_for(config, tmp_path, "none")


@pytest.mark.parametrize("name", ["bert", "albert-pair", "xlnet", "modernbert", "xlm", "electra-generator", "bart"])
def test_transformers_reads_the_same(tmp_path: Path, name: str) -> None:
    """With a lone copy the same model as with the original, with another copy another model."""
    config, heads = CASES[name]
    _, tensors = exported(config, heads, tmp_path)
    expected = scores(tmp_path, heads)
    for copy, original, _ in copies(config, heads):
        rest = {name: tensor for name, tensor in tensors.items() if name != original}
        write(tmp_path, rest | {copy: tensors[original]})
        assert torch.equal(scores(tmp_path, heads), expected)
        write(tmp_path, tensors | {copy: tensors[original] + 1})
        assert not torch.equal(scores(tmp_path, heads), expected)


def scores(folder: Path, heads: Heads) -> Tensor:
    factories = {"mlm": AutoModelForMaskedLM, "denoise": AutoModelForSeq2SeqLM}
    model = factories.get(heads, AutoModelForPreTraining).from_pretrained(folder).eval()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        found = model(input_ids=ids, attention_mask=torch.ones_like(ids))
    logits: Tensor = found.prediction_logits if heads == "mlm_pair" else found.logits
    return logits
