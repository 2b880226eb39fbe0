"""What we export, transformers loads: the same logits, the same tokenizer. Pairs go out and come back, embeddings
shared or gradient-disentangled.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, AutoModelForMaskedLM, AutoTokenizer

from checkpoints.hf.export import pair_weights_for
from checkpoints.hf.load import load_pretrained
from data_service.store.base import Store
from data_service.store.open import open_store
from encoder_core.errors import ModelError
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import DetectorConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.objectives.multitask import MultitaskModel
from encoder_core.objectives.network import masked_language_model
from encoder_core.objectives.replaced import (
    ReplacedTokenDetection,
    discriminator_model,
    gradient_disentangled_detection,
    replaced_token_detection,
)
from encoder_core.terms.replaced import ReplacedTokenConfig, Sharing
from tests.support.models.parity import assert_close, make_batch, pad, parameters_of, random_weights
from tests.support.models.written import export_model, export_pair


@pytest.fixture
def exported(
    tmp_path: Path,
    config: RobertaConfig,
    parameters: dict[str, Tensor],
    tokenizer_files: dict[str, bytes],
) -> Path:
    export_model(parameters.__getitem__, config, tokenizer_files, open_store(str(tmp_path / "out")))
    return tmp_path / "out"


def test_transformers_loads_it_with_the_same_logits(
    exported: Path, model: MultitaskModel, config: RobertaConfig
) -> None:
    theirs, report = AutoModelForMaskedLM.from_pretrained(exported, output_loading_info=True)
    assert not any(report.values()), report
    assert theirs.dtype == torch.float32
    batch = make_batch([12, 40, 3], config.vocabulary)
    padded = pad(batch, config.pad_id)
    logits = theirs.eval()(padded.input_ids, attention_mask=padded.attention_mask).logits
    expected = padded.flat(logits)[batch.target_positions]
    torch.testing.assert_close(model.logits(batch), expected, rtol=0, atol=1e-5)


def test_the_tokenizer_comes_along(exported: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(exported)
    encoded = tokenizer("plain text")["input_ids"]
    assert (encoded[0], encoded[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id) == (0, 2)
    assert tokenizer.decode(encoded, skip_special_tokens=True) == "plain text"
    assert tokenizer.mask_token_id == 4


def test_config_json_says_what_the_model_is(exported: Path, config: RobertaConfig) -> None:
    their = AutoConfig.from_pretrained(exported)
    assert (their.model_type, their.vocab_size) == ("roberta", 261)
    assert their.max_position_embeddings == config.max_length + 2
    assert (their.bos_token_id, their.pad_token_id, their.eos_token_id) == (0, 1, 2)


def test_the_decoder_is_stored_once(exported: Path) -> None:
    from safetensors import safe_open

    with safe_open(exported / "model.safetensors", framework="pt") as file:
        assert "lm_head.decoder.weight" not in file.keys()  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}


def test_bf16_masters_are_widened(
    tmp_path: Path, config: RobertaConfig, parameters: dict[str, Tensor]
) -> None:
    export_model(lambda name: parameters[name].bfloat16(), config, {}, open_store(str(tmp_path / "out")))
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    word = theirs.get_input_embeddings().weight
    assert torch.equal(word, parameters["encoder.embeddings.word.weight"].bfloat16().float())


def test_nothing_appears_unless_it_reads_back_the_same(
    tmp_path: Path, config: RobertaConfig, parameters: dict[str, Tensor]
) -> None:
    reads = dict.fromkeys(parameters, 0)

    def unsteady(name: str) -> Tensor:
        reads[name] += 1
        return parameters[name] + 1e-6 * reads[name]

    with pytest.raises(ModelError, match="embeddings"):
        export_model(unsteady, config, {}, open_store(str(tmp_path / "out")))
    assert not (tmp_path / "out" / "config.json").exists()


@pytest.mark.long
def test_any_store_will_do(
    any_store: Store,
    config: RobertaConfig,
    parameters: dict[str, Tensor],
    tokenizer_files: dict[str, bytes],
) -> None:
    export_model(parameters.__getitem__, config, tokenizer_files, any_store)
    keys = {entry.key for entry in any_store.list()}
    assert keys == {"config.json", "model.safetensors", "maskfleet_export.json", *tokenizer_files}
    assert json.loads(any_store.get("config.json"))["architectures"] == ["RobertaForMaskedLM"]


SHAPE: dict[str, Any] = {
    "layers": 4,
    "hidden": 32,
    "heads": 4,
    "feed_forward": 48,
    "max_length": 40,
    "vocab": 90,
}
ELECTRA = ElectraConfig(**SHAPE, embedding=16, generator_divisor=2)
DEBERTA = DebertaV2Config(**SHAPE, buckets=8, mask_decoder="plain")
CASES: dict[str, tuple[DetectorConfig, Sharing]] = {
    "electra": (ELECTRA, "shared"),
    "electra-disentangled": (ELECTRA, "gradient_disentangled"),
    "deberta-shared": (DEBERTA, "shared"),
    "deberta": (DEBERTA, "gradient_disentangled"),
    "bert": (BertConfig(**SHAPE), "shared"),
    "roberta": (RobertaConfig(**SHAPE), "gradient_disentangled"),
    "albert": (AlbertConfig(**SHAPE, embedding=16, groups=3), "shared"),
    "albert-disentangled": (AlbertConfig(**SHAPE, embedding=16), "gradient_disentangled"),
    "modernbert": (ModernBertConfig(**SHAPE, local_attention=8), "shared"),
    "modernbert-deep": (
        ModernBertConfig(**SHAPE, local_attention=8, generator_layers=3),
        "gradient_disentangled",
    ),
    "deberta-v1": (DebertaConfig(**SHAPE, mask_decoder="plain"), "shared"),
    "deberta-enhanced": (DEBERTA.model_copy(update={"mask_decoder": "enhanced"}), "gradient_disentangled"),
}


def joint(config: DetectorConfig, sharing: Sharing) -> ReplacedTokenDetection:
    objective = ReplacedTokenConfig(embeddings=sharing)
    if sharing == "shared":
        return random_weights(replaced_token_detection(config, objective)).eval()
    return random_weights(gradient_disentangled_detection(config, objective)).eval()


@pytest.mark.parametrize(("config", "sharing"), CASES.values(), ids=CASES)
def test_out_and_back(tmp_path: Path, config: DetectorConfig, sharing: Sharing) -> None:
    model = joint(config, sharing)
    parameters = parameters_of(model)
    export_pair(parameters.__getitem__, config, {}, open_store(str(tmp_path)), sharing)
    tensors = pair_weights_for(config, tmp_path, sharing)
    assert tensors.keys() == parameters.keys()
    batch = make_batch([20, 40], 90)
    before = model.generator.logits(batch), model.discriminator.logits(batch)
    for name, tensor in tensors.items():
        if "discriminator.encoder.embeddings" not in name:
            assert torch.equal(tensor, parameters[name]), name
        with torch.no_grad():
            parameters[name].copy_(tensor)
    assert torch.equal(model.generator.logits(batch), before[0])
    assert_close(model.discriminator.logits(batch), before[1])


@pytest.mark.parametrize(("config", "sharing"), CASES.values(), ids=CASES)
def test_transformers_loads_both(tmp_path: Path, config: DetectorConfig, sharing: Sharing) -> None:
    """Hidden states of the discriminator, logits of the generator (transformers has no enhanced decoder)."""
    model = joint(config, sharing)
    export_pair(parameters_of(model).__getitem__, config, {}, open_store(str(tmp_path)), sharing)
    batch = make_batch([20, 40], 90)
    padded = pad(batch, config.pad_id)
    inputs = {"input_ids": padded.input_ids, "attention_mask": padded.attention_mask}
    with torch.no_grad():
        discriminator = AutoModel.from_pretrained(tmp_path / "discriminator").eval()
        hidden = padded.flat(discriminator(**inputs).last_hidden_state)
        assert_close(model.discriminator.encoder(batch), hidden)
        generator = AutoModelForMaskedLM.from_pretrained(tmp_path / "generator").eval()
        if getattr(config, "mask_decoder", "plain") == "plain":
            logits = padded.flat(generator(**inputs).logits)[batch.target_positions]
            assert_close(model.generator.logits(batch), logits)


@pytest.mark.parametrize(("config", "sharing"), CASES.values(), ids=CASES)
def test_each_folder_is_a_model_of_its_own(tmp_path: Path, config: DetectorConfig, sharing: Sharing) -> None:
    model = joint(config, sharing)
    export_pair(parameters_of(model).__getitem__, config, {}, open_store(str(tmp_path)), sharing)
    batch = make_batch([20, 40], 90)
    alone = discriminator_model(config).eval()
    alone.load_state_dict(load_pretrained(tmp_path / "discriminator", "rtd").tensors)
    torch.testing.assert_close(alone.logits(batch), model.discriminator.logits(batch))
    filler = masked_language_model(config.generator).eval()
    filler.load_state_dict(
        load_pretrained(tmp_path / "generator").tensors, strict=False
    )  # the decoder is tied
    torch.testing.assert_close(filler.logits(batch), model.generator.logits(batch))


def test_separate_embeddings_can_be_disentangled_but_not_shared(tmp_path: Path) -> None:
    model = joint(ELECTRA, "gradient_disentangled")
    export_pair(
        parameters_of(model).__getitem__, ELECTRA, {}, open_store(str(tmp_path)), "gradient_disentangled"
    )
    with pytest.raises(ModelError, match=rf"{tmp_path} .*embeddings.*\bword"):
        pair_weights_for(ELECTRA, tmp_path)
