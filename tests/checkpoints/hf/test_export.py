"""Exports of pairs, embeddings shared or gradient-disentangled: transformers loads both, and they come back. What is
written is read back before it appears."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForMaskedLM

from checkpoints.hf.export import pair_weights_for
from checkpoints.hf.load import load_pretrained
from data_service.store.open import open_store
from encoder_core.batch import Batch
from encoder_core.errors import ModelError
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.objectives.modules.detection import ReplacedTokenDetection, discriminator_model
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.objectives.replaced import ReplacedTokenConfig, Sharing
from tests.support.models.parity import assert_close, make_batch, pad, parameters_of, random_weights
from tests.support.models.written import export_model, export_pair

CONFIG = RobertaConfig(layers=2, hidden=32, heads=4, feed_forward=48, max_length=40, vocab=261)


@pytest.fixture(scope="module")
def parameters() -> dict[str, Tensor]:
    return parameters_of(random_weights(masked_language_model(CONFIG)))


def test_bf16_masters_are_widened(tmp_path: Path, parameters: dict[str, Tensor]) -> None:
    export_model(lambda name: parameters[name].bfloat16(), CONFIG, {}, open_store(str(tmp_path / "out")))
    theirs = AutoModelForMaskedLM.from_pretrained(tmp_path / "out")
    word = theirs.get_input_embeddings().weight
    assert torch.equal(word, parameters["encoder.embeddings.word.weight"].bfloat16().float())


def test_nothing_appears_unless_it_reads_back_the_same(tmp_path: Path, parameters: dict[str, Tensor]) -> None:
    reads = dict.fromkeys(parameters, 0)

    def unsteady(name: str) -> Tensor:
        reads[name] += 1
        return parameters[name] + 1e-6 * reads[name]

    with pytest.raises(ModelError, match="embeddings"):
        export_model(unsteady, CONFIG, {}, open_store(str(tmp_path / "out")))
    assert not (tmp_path / "out" / "config.json").exists()


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
CASES: dict[str, tuple[ModelConfig, Sharing]] = {
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


def joint(config: ModelConfig, sharing: Sharing) -> ReplacedTokenDetection:
    return random_weights(ReplacedTokenConfig(embeddings=sharing).build(config)).eval()


@pytest.mark.parametrize(("config", "sharing"), CASES.values(), ids=CASES)
def test_a_pair_comes_back_and_each_folder_is_a_model_for_ours_and_for_transformers(
    tmp_path: Path, config: ModelConfig, sharing: Sharing
) -> None:
    """Hidden states of the discriminator, logits of the generator (transformers has no enhanced decoder)."""
    model, batch = joint(config, sharing), make_batch([20, 40], 90)
    parameters = parameters_of(model)
    export_pair(parameters.__getitem__, config, {}, open_store(str(tmp_path)), sharing)
    before = model.generator.logits(batch), model.discriminator.logits(batch)
    ensure_transformers_loads_both(tmp_path, config, model, batch)

    alone = discriminator_model(config).eval()
    alone.load_state_dict(load_pretrained(tmp_path / "discriminator", "rtd").tensors)
    torch.testing.assert_close(alone.logits(batch), before[1])
    filler = masked_language_model(config.generator).eval()
    tied = load_pretrained(tmp_path / "generator").tensors  # the decoder is not among them
    filler.load_state_dict(tied, strict=False)
    torch.testing.assert_close(filler.logits(batch), before[0])

    tensors = pair_weights_for(config, tmp_path, sharing)
    assert tensors.keys() == parameters.keys()
    for name, tensor in tensors.items():
        if "discriminator.encoder.embeddings" not in name:
            assert torch.equal(tensor, parameters[name]), name
        with torch.no_grad():
            parameters[name].copy_(tensor)
    assert torch.equal(model.generator.logits(batch), before[0])
    assert_close(model.discriminator.logits(batch), before[1])


@torch.no_grad()
def ensure_transformers_loads_both(
    folder: Path, config: ModelConfig, model: ReplacedTokenDetection, batch: Batch
) -> None:
    padded = pad(batch, config.pad_id)
    inputs = {"input_ids": padded.input_ids, "attention_mask": padded.attention_mask}
    discriminator = AutoModel.from_pretrained(folder / "discriminator").eval()
    hidden = padded.flat(discriminator(**inputs).last_hidden_state)
    assert_close(model.discriminator.encoder(batch), hidden)
    generator = AutoModelForMaskedLM.from_pretrained(folder / "generator").eval()
    if getattr(config, "mask_decoder", "plain") == "plain":
        logits = padded.flat(generator(**inputs).logits)[batch.target_positions]
        assert_close(model.generator.logits(batch), logits)


def test_separate_embeddings_can_be_disentangled_but_not_shared(tmp_path: Path) -> None:
    model = joint(ELECTRA, "gradient_disentangled")
    export_pair(parameters_of(model).__getitem__, ELECTRA, {}, open_store(str(tmp_path)), "gradient_disentangled")
    with pytest.raises(ModelError, match=rf"{tmp_path} .*embeddings.*\bword"):
        pair_weights_for(ELECTRA, tmp_path)
