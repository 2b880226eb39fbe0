"""Generator and discriminator out to transformers and back: shared and gradient-disentangled embeddings."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForMaskedLM

from checkpoints.hf.load import load_pretrained
from checkpoints.hf.pair import export_pair, pair_weights_for
from data_service.store.open import open_store
from encoder_core.errors import ModelError
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import DetectorConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.objectives.mlm import masked_language_model
from encoder_core.objectives.replaced import (
    ReplacedTokenConfig,
    ReplacedTokenDetection,
    Sharing,
    discriminator_model,
    gradient_disentangled_detection,
    replaced_token_detection,
)
from tests.support.models.parity import assert_close, make_batch, pad, parameters_of, random_weights

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
    with pytest.raises(ModelError, match=r"do not share their embeddings: .*word"):
        pair_weights_for(ELECTRA, tmp_path)
