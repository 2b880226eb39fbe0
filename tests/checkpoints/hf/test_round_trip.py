"""Folders that the current transformers saves, of every family and any configuration: the same model here.

Their model is made from a configuration drawn at random, saved, loaded and saved again by transformers alone.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModel, PreTrainedModel

from checkpoints.hf.load import load_pretrained
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig, hf_format_of
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.electra import ElectraConfig
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.interchange import ENCODER_PREFIX, Heads
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.families.xlm import XlmConfig
from encoder_core.families.xlnet import XlnetConfig
from tests.support.models.parity import make_batch, pad, random_weights

VOCAB = 61
TYPES = ("bert", "albert", "electra")  # the families whose inputs have segments


@st.composite
def configs(draw: st.DrawFn, family: type[ModelConfig]) -> ModelConfig:
    heads = draw(st.sampled_from([1, 2, 4]))
    hidden = heads * draw(st.sampled_from([8, 16]))
    fields: dict[str, Any] = {
        "layers": draw(st.integers(1, 3)),
        "heads": heads,
        "hidden": hidden,
        "feed_forward": 4 * hidden if family is XlmConfig else draw(st.integers(3, 90)),
        "max_length": draw(st.integers(24, 70)),
        "vocab": VOCAB,
        "pad_id": draw(st.integers(0, 7)),
        "dropout": draw(st.sampled_from([0.0, 0.1, 0.25])),
        "attention_dropout": draw(st.sampled_from([0.0, 0.1, 0.3])),
        "layer_norm_eps": draw(st.sampled_from([1e-12, 1e-7, 1e-5, 1e-3])),
        "initializer_range": draw(st.sampled_from([0.02, 0.1])),
    }
    if family is not XlmConfig:
        fields["activation"] = draw(st.sampled_from(["gelu", "gelu_tanh"]))
    own: dict[Any, dict[str, st.SearchStrategy[Any]]] = {
        BertConfig: {"token_types": st.integers(0, 3)},
        AlbertConfig: {"embedding": st.integers(4, 40), "token_types": st.integers(1, 3)},
        ElectraConfig: {"embedding": st.integers(4, 40), "token_types": st.integers(1, 3)},
        XlmConfig: {"languages": st.sampled_from([(), ("en", "fr"), ("a", "b", "c")])},
        ModernBertConfig: {
            "local_attention": st.sampled_from([8, 16, 128]),
            "global_every": st.integers(1, 3),
        },
        EuroBertConfig: {"key_value_heads": st.sampled_from([n for n in (1, 2, 4) if heads % n == 0])},
    }
    for name, strategy in own.get(family, {}).items():
        fields[name] = draw(strategy)
    if family is BertConfig and fields["token_types"] == 0:
        fields["layer_norm_eps"] = 1e-12
    # What transformers' class cannot say otherwise.
    if family is ElectraConfig:
        fields["generator_divisor"] = 1
    if family in (DebertaConfig, DebertaV2Config):
        fields["mask_decoder"] = "plain"  # the enhanced one's positions have no place in their model
    if family in (ModernBertConfig, EuroBertConfig):
        fields["attention_output_dropout"] = fields["attention_dropout"] if family is ModernBertConfig else 0.0
    if family is ModernBertConfig:  # a period is seen where it begins again
        fields["layers"] = max(fields["layers"], fields["global_every"] + 1)
    if family is EuroBertConfig:
        fields["key_value_heads"] = None if fields["key_value_heads"] == heads else fields["key_value_heads"]
        fields["activation"] = "silu"
        fields["dropout"] = 0.0
    if family is XlnetConfig:
        fields["attention_dropout"] = fields["dropout"]
    known = {name: value for name, value in fields.items() if name in family.model_fields}
    return family(**known)


def their_model(config: ModelConfig, heads: Heads, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    their = hf_format_of(config, heads)
    described = {name: value for name, value in their.fields.items() if name != "model_type"}
    settings_ = AutoConfig.for_model(their.fields["model_type"], **described)
    return random_weights(getattr(transformers, str(their.architecture))(settings_)).to(dtype)


FAMILIES = (
    BertConfig,
    RobertaConfig,
    AlbertConfig,
    ElectraConfig,
    DebertaConfig,
    DebertaV2Config,
    ModernBertConfig,
    EuroBertConfig,
    XlmConfig,
    XlnetConfig,
)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
@settings(deadline=None, max_examples=4, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_what_transformers_saves_is_the_same_model(
    tmp_path_factory: pytest.TempPathFactory, family: type[ModelConfig], data: st.DataObject
) -> None:
    config = data.draw(configs(family))
    heads: Heads = "plm" if family is XlnetConfig else "mlm"
    folder = tmp_path_factory.mktemp("saved")
    theirs = their_model(config, heads)
    theirs.save_pretrained(folder / "once")
    type(theirs).from_pretrained(folder / "once").save_pretrained(folder / "twice")
    found = load_pretrained(folder / "twice", heads)
    assert found.config == config
    if family is not XlnetConfig:  # whose states here are those of its own objective, see tests/parity
        assert_same_states(folder / "twice", found.config, found.tensors, 1e-5)


@torch.no_grad()
def assert_same_states(
    folder: Path,
    config: ModelConfig,
    tensors: dict[str, torch.Tensor],
    most: float,
    dtype: torch.dtype = torch.float32,
) -> None:
    """The last states of our encoder and of `AutoModel`, relative to the largest."""
    theirs = AutoModel.from_pretrained(folder, dtype=dtype).eval()
    encoder = config.encoder().to(dtype).eval()
    for name, parameter in encoder.named_parameters():
        parameter.copy_(tensors[ENCODER_PREFIX + name])
    segments = config.family in TYPES and getattr(config, "token_types", 0) > 1
    batch = make_batch([17, 3, 1, 20], VOCAB, segments=segments)
    padded = pad(batch, config.pad_id)
    given = {"token_type_ids": padded.token_type_ids} if segments else {}
    expected = theirs(padded.input_ids, attention_mask=padded.attention_mask, **given).last_hidden_state
    last = encoder(batch)
    difference = (last - padded.flat(expected)).abs().max() / expected.abs().max()
    assert difference < most


@settings(deadline=None, max_examples=4, suppress_health_check=list(HealthCheck))
@given(config=configs(RobertaConfig))
def test_robertas_row_of_types_is_added_exactly(
    tmp_path_factory: pytest.TempPathFactory, config: RobertaConfig
) -> None:
    """In fp64, where the rounding of the sum to fp32 shows; an fp32 model gets the sum that fp32 gives."""
    folder = tmp_path_factory.mktemp("saved")
    theirs = their_model(config, "mlm")
    theirs.save_pretrained(folder)
    found = load_pretrained(folder)
    assert_same_states(folder, config, found.tensors, 1e-9, torch.float64)
    embeddings = theirs.roberta.embeddings
    rounded = embeddings.position_embeddings.weight + embeddings.token_type_embeddings.weight[0]
    assert torch.equal(found.tensors["encoder.embeddings.position.weight"].float(), rounded)


@pytest.mark.parametrize(
    ("written", "pad_id"),
    [
        ({"pad_token_id": 0}, 0),
        ({"pad_token_id": None}, 2),
        ({"pad_index": 3}, 3),
        ({"pad_index": 3, "pad_token_id": 5}, 3),
        ({}, 2),
    ],
)
def test_xlms_padding_under_either_name(written: dict[str, int | None], pad_id: int) -> None:
    from encoder_core.families import xlm

    fields = xlm.to_json(XlmConfig(layers=1, hidden=8, heads=1, feed_forward=32, max_length=16, vocab=VOCAB))
    fields = {name: value for name, value in fields.items() if not name.startswith("pad_")}
    assert xlm.from_json(fields | written).pad_id == pad_id
