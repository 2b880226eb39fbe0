"""What we export, transformers loads: the same logits, the same tokenizer."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForMaskedLM, AutoTokenizer

from checkpoints.hf.export import export_model
from data_service.store.base import Store
from data_service.store.open import open_store
from encoder_core.errors import ModelError
from encoder_core.families.roberta import RobertaConfig
from encoder_core.objectives.multitask import MultitaskModel
from tests.support.models.parity import make_batch, pad


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

    with pytest.raises(ModelError, match="does not read back"):
        export_model(unsteady, config, {}, open_store(str(tmp_path / "out")))
    assert not (tmp_path / "out" / "config.json").exists()


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
