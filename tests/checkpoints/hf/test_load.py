"""What transformers saves, we load; what does not fit is named."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import RobertaConfig as TheirConfig
from transformers import RobertaForMaskedLM

from checkpoints.hf.load import load_pretrained, weights_for
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import hf_format_of
from encoder_core.families.roberta import RobertaConfig
from encoder_core.objectives.modules.network import masked_language_model
from tests.support.models.parity import make_batch, pad, random_weights

CONFIG = RobertaConfig(layers=2, hidden=32, heads=4, feed_forward=48, max_length=40, vocab=261)


@pytest.fixture
def theirs() -> RobertaForMaskedLM:
    return random_weights(RobertaForMaskedLM(TheirConfig(**hf_format_of(CONFIG).fields))).eval()


@pytest.fixture
def folder(tmp_path: Path, theirs: RobertaForMaskedLM) -> Path:
    theirs.save_pretrained(tmp_path / "theirs")
    return tmp_path / "theirs"


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
def test_same_configuration_and_logits_from_one_file_or_several(
    tmp_path: Path, theirs: RobertaForMaskedLM, shard: str
) -> None:
    theirs.save_pretrained(tmp_path, max_shard_size=shard)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "20KB")
    found = load_pretrained(tmp_path)
    assert found.config == CONFIG
    ours = masked_language_model(CONFIG).eval()
    assert ours.load_state_dict(found.tensors, strict=False).missing_keys == ["head.decoder.weight"]  # tied
    batch = make_batch([9, 40], 261)
    padded = pad(batch, 1)
    logits = theirs(padded.input_ids, attention_mask=padded.attention_mask).logits
    expected = padded.flat(logits)[batch.target_positions]
    torch.testing.assert_close(ours.logits(batch), expected, rtol=0, atol=1e-5)


def test_old_names_of_norms_and_known_extras(folder: Path) -> None:
    before = load_pretrained(folder).tensors
    path = folder / "model.safetensors"
    state = load_file(path)
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
        for name, value in state.items()
    }
    renamed["lm_head.decoder.bias"] = state["lm_head.bias"].clone()
    renamed["roberta.embeddings.position_ids"] = torch.arange(42)[None]
    renamed["roberta.pooler.dense.weight"] = torch.zeros(32, 32)
    save_file(renamed, path)
    after = load_pretrained(folder).tensors
    assert all(torch.equal(before[name], after[name]) for name in before)


def edit(folder: Path, **fields: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vocab_size": 300}, r"encoder\.embeddings\.word\.weight is \(261, 32\), not \(300, 32\)"),
        ({"max_position_embeddings": 34}, r"position\.weight is \(42, 32\), not \(34, 32\)"),
        ({"num_hidden_layers": 3}, r"missing roberta\.encoder\.layer\.2\.attention"),
        ({"num_hidden_layers": 1}, r"unknown roberta\.encoder\.layer\.1\.attention"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2'"),
        ({"model_type": "qwen3"}, "model_type is 'qwen3'.*norms of queries and keys"),
        ({"model_type": "gemma3"}, "model_type is 'gemma3'.*norms after blocks"),
        ({"model_type": "gemma3_text"}, "model_type is 'gemma3_text'.*norms after blocks"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({"is_decoder": True}, "is_decoder is true"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings is false"),
        ({"num_attention_heads": 5}, "multiple of heads"),
    ],
)
def test_what_does_not_fit_is_named(folder: Path, fields: dict[str, object], message: str) -> None:
    edit(folder, **fields)
    with pytest.raises(ModelError, match=message):
        load_pretrained(folder)


def test_pickled_weights_are_not_opened(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"model\.safetensors\n.*pickled"):
        load_pretrained(folder)


def test_a_missing_folder_and_damaged_files_are_named(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"nowhere/config\.json"):
        load_pretrained(folder / "nowhere")
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors.*damaged"):
        load_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json.*\bJSON"):
        load_pretrained(folder)


def test_an_index_may_not_lead_out_of_the_folder(folder: Path) -> None:
    index = {"weight_map": {"lm_head.bias": "../theirs/model.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"theirs/model\.safetensors"):
        load_pretrained(folder)


def test_starting_another_model_from_it_is_refused_with_a_diff(folder: Path) -> None:
    assert set(weights_for(CONFIG.model_copy(update={"dropout": 0.0}), folder))
    with pytest.raises(ModelError, match=r"layers\b.*\b4\b.*\b2\b.*heads\b.*\b2\b.*\b4\b"):
        weights_for(CONFIG.model_copy(update={"layers": 4, "heads": 2}), folder)
