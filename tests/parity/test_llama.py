"""A Llama, read as a EuroBERT, on causal rows: logits, losses and gradients are those of transformers' causal class.

transformers computes RMSNorm in fp32, in fp64 models too, and rounds the angles' cosines to the model's precision. The
fp64 tests replace the norm; angles are in fp32 by both.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from checkpoints.hf.load import load_pretrained, weights_for
from encoder_core.batch import Batch
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import hf_format_of, read_config
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.objectives.clm import ClmConfig
from encoder_core.objectives.compose import compose
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.multitask import MultitaskModel
from tests.support.models.parity import assert_close, copy_from, make_batch, pad, random_weights
from tests.support.models.peers import unrounded_norm

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 600,
    "vocab_size": 101,
}


@pytest.fixture(scope="module", autouse=True)
def unrounded() -> Any:
    """Their fp64 models are exact; see above."""
    with unrounded_norm(LlamaRMSNorm):
        yield


def their_model(fields: dict[str, Any], dtype: torch.dtype) -> LlamaForCausalLM:
    return random_weights(LlamaForCausalLM(LlamaConfig(**fields))).to(dtype).eval()


def ours_of(theirs: LlamaForCausalLM, dtype: torch.dtype) -> MultitaskModel:
    """Both objectives' network with their weights, from their own config.json."""
    config = read_config(theirs.config.to_dict())
    assert isinstance(config, EuroBertConfig)
    ours = compose(config, {"mlm": MlmConfig(), "clm": ClmConfig()})
    assert isinstance(ours, MultitaskModel)
    copy_from(theirs, ours, hf_format_of(config))
    return ours.to(dtype).eval()


def causal_rows(lengths: list[int], vocab: int) -> Batch:
    batch = make_batch(lengths, vocab)
    at_M = torch.arange(len(batch.tokens))[batch.positions > 0]
    return replace(batch, causal=True, target_positions=at_M, target_ids=batch.tokens[at_M])


def assert_same(ours: MultitaskModel, theirs: LlamaForCausalLM, batch: Batch) -> None:
    """Logits before every target, and the loss: theirs shifts labels by itself, and computes it in fp32."""
    padded = pad(batch, 0)
    found = theirs(padded.input_ids, attention_mask=padded.attention_mask, labels=padded.labels)
    logits_TV = padded.flat(found.logits)
    before_MV = logits_TV[batch.target_positions - 1]
    assert_close(ours.logits(batch), before_MV)
    term = next(term for term in ours(batch).terms if term.name == "clm")
    assert_close(term.loss_sum / term.targets, F.cross_entropy(before_MV, batch.target_ids))
    assert_close((term.loss_sum / term.targets).float(), found.loss)


@pytest.mark.parametrize("tied", [False, True], ids=["own_decoder", "tied"])
@pytest.mark.parametrize("lengths", [[1, 2, 3, 17], [63, 64, 65, 129], [300, 1, 40, 511]], ids=str)
def test_same_weights_same_logits_in_fp32(tied: bool, lengths: list[int]) -> None:
    theirs = their_model(SHAPE | {"tie_word_embeddings": tied}, torch.float32)
    with torch.no_grad():
        assert_same(ours_of(theirs, torch.float32), theirs, causal_rows(lengths, 101))


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    shared, times, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 6))
    return {
        "num_hidden_layers": draw(st.integers(1, 4)),
        "hidden_size": shared * times * width,
        "num_attention_heads": shared * times,
        "num_key_value_heads": shared,
        "intermediate_size": draw(st.integers(1, 40)),
        "vocab_size": draw(st.integers(20, 60)),
        "rms_norm_eps": draw(st.sampled_from([1e-5, 1e-6])),
        "rope_theta": draw(st.sampled_from([100.0, 10_000.0, 500_000.0])),
        "tie_word_embeddings": draw(st.booleans()),
    }


@settings(max_examples=12, deadline=None)
@given(
    fields=shapes(),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=4).filter(lambda n: max(n) > 1),
)
def test_any_shape_and_any_rows_in_fp64(fields: dict[str, Any], lengths: list[int]) -> None:
    theirs = their_model(fields, torch.float64)
    with torch.no_grad():
        assert_same(ours_of(theirs, torch.float64), theirs, causal_rows(lengths, fields["vocab_size"]))


@pytest.mark.parametrize("tied", [False, True], ids=["own_decoder", "tied"])
def test_a_saved_folder_is_read(tied: bool, tmp_path: Path) -> None:
    theirs = their_model(SHAPE | {"tie_word_embeddings": tied}, torch.float32)
    theirs.save_pretrained(tmp_path)
    read = load_pretrained(tmp_path)
    assert isinstance(read.config, EuroBertConfig)
    assert read.config.has_tied_decoder is tied
    expected = dict(ours_of(theirs, torch.float32).named_parameters())
    assert read.tensors.keys() == expected.keys() == weights_for(read.config, tmp_path).keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in read.tensors.items())


def test_another_kind_of_decoder_is_told(tmp_path: Path) -> None:
    """A recipe that says the decoder has weights of its own does not start from one that has none."""
    theirs = their_model(SHAPE | {"tie_word_embeddings": True}, torch.float32)
    theirs.save_pretrained(tmp_path)
    config = load_pretrained(tmp_path).config
    with pytest.raises(ModelError, match="tied_decoder"):
        weights_for(config.model_copy(update={"tied_decoder": False}), tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "relu"},
        {"head_dim": 64},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}},
    ],
    ids=str,
)
def test_what_no_eurobert_can_express_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(change))):
        read_config({"model_type": "llama"} | SHAPE | change)


def test_what_the_file_leaves_out_is_transformers_own() -> None:
    """A Llama 1 of 7 billion weights, whose file may say nothing."""
    config = read_config({"model_type": "llama"})
    default = LlamaConfig()
    assert isinstance(config, EuroBertConfig)
    assert (config.layers, config.hidden, config.heads, config.feed_forward) == (
        default.num_hidden_layers,
        default.hidden_size,
        default.num_attention_heads,
        default.intermediate_size,
    )
    assert (config.vocab, config.layer_norm_eps, config.key_value_head_count, config.rotary_base) == (
        default.vocab_size,
        default.rms_norm_eps,
        default.num_key_value_heads,
        10_000.0,
    )
