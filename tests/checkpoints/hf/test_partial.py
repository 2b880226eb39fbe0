"""Folders of transformers classes with other heads, or none: the encoder is taken whole, and what heads there are."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AlbertConfig as TheirAlbert
from transformers import (
    AlbertModel,
    BertForSequenceClassification,
    BertModel,
    DebertaV2ForMaskedLM,
    DebertaV2Model,
    PreTrainedModel,
    RobertaForTokenClassification,
    RobertaModel,
)
from transformers import BertConfig as TheirBert
from transformers import DebertaV2Config as TheirDebertaV2
from transformers import RobertaConfig as TheirRoberta

from checkpoints.hf.load import read_folder_config, weights_for
from encoder_core.errors import ModelError
from encoder_core.families.interchange import Heads
from tests.support.models.parity import random_weights

SHAPE = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
BERT = TheirBert(vocab_size=61, max_position_embeddings=40, **SHAPE)
ROBERTA = TheirRoberta(vocab_size=61, max_position_embeddings=42, type_vocab_size=1, **SHAPE)
ALBERT = TheirAlbert(vocab_size=61, embedding_size=16, max_position_embeddings=40, **SHAPE)
DEBERTA = TheirDebertaV2(
    vocab_size=61,
    max_position_embeddings=40,
    position_buckets=8,
    relative_attention=True,
    share_att_key=True,
    norm_rel_ebd="layer_norm",
    pos_att_type=["p2c", "c2p"],
    position_biased_input=False,
    type_vocab_size=0,
    **SHAPE,
)
CASES: dict[str, tuple[PreTrainedModel, Heads, str]] = {
    "bert": (BertModel(BERT), "mlm_pair", "bert."),
    "bert-classifier": (BertForSequenceClassification(BERT), "mlm", ""),
    "roberta": (RobertaModel(ROBERTA), "mlm", "roberta."),
    "roberta-tagger": (RobertaForTokenClassification(ROBERTA), "mlm", ""),
    "albert": (AlbertModel(ALBERT), "mlm_pair", "albert."),
    "deberta-v2": (DebertaV2Model(DEBERTA), "mlm", "deberta."),
}


@pytest.mark.parametrize(("theirs", "heads", "beginning"), CASES.values(), ids=CASES)
def test_the_encoder_is_taken_and_foreign_heads_are_not(
    tmp_path: Path, theirs: PreTrainedModel, heads: Heads, beginning: str
) -> None:
    random_weights(theirs).save_pretrained(tmp_path)
    found = weights_for(read_folder_config(tmp_path), tmp_path, heads)
    state = {beginning + name: value for name, value in theirs.state_dict().items()}
    family = next(iter(state)).partition(".")[0]
    word = state[f"{family}.embeddings.word_embeddings.weight"]
    assert torch.equal(found["encoder.embeddings.word.weight"], word)
    assert not any(name.startswith("head.") for name in found)
    assert any(name.startswith("encoder.layers.") for name in found)
    assert ("pair_head.pooler.weight" in found) == (heads == "mlm_pair")


def test_the_head_of_older_debertas_is_known(tmp_path: Path) -> None:
    assert DEBERTA.legacy
    theirs = random_weights(DebertaV2ForMaskedLM(DEBERTA))
    theirs.save_pretrained(tmp_path)
    found = weights_for(read_folder_config(tmp_path), tmp_path)
    dense = theirs.state_dict()["cls.predictions.transform.dense.weight"]
    assert torch.equal(found["head.dense.weight"], dense)
    assert {name for name in found if name.startswith("head.")} == {
        "head.dense.weight",
        "head.dense.bias",
        "head.norm.weight",
        "head.norm.bias",
        "head.decoder.bias",
    }


def test_an_encoder_must_be_whole(tmp_path: Path) -> None:
    BertModel(BERT).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    gone = "encoder.layer.1.output.dense.bias"
    save_file({name: value for name, value in state.items() if name != gone}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=rf"missing bert\.{gone}"):
        weights_for(read_folder_config(tmp_path), tmp_path)
    save_file(state | {"encoder.layer.2.output.dense.bias": state[gone].clone()}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"unknown bert\.encoder\.layer\.2"):
        weights_for(read_folder_config(tmp_path), tmp_path)


def test_what_weights_do_not_depend_on_may_differ(tmp_path: Path) -> None:
    BertModel(BERT).save_pretrained(tmp_path)
    config = read_folder_config(tmp_path)
    assert weights_for(config.model_copy(update={"dropout": 0.0, "pad_id": 7}), tmp_path)
    with pytest.raises(ModelError, match=r"max_length\b.*\b41\b.*\b40\b"):
        weights_for(config.model_copy(update={"max_length": 41}), tmp_path)
    RobertaModel(ROBERTA).save_pretrained(tmp_path)
    config = read_folder_config(tmp_path)
    with pytest.raises(ModelError, match=r"pad_id\b.*\b7\b.*\b1\b"):
        weights_for(config.model_copy(update={"pad_id": 7}), tmp_path)
