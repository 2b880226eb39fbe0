"""Masked language models against transformers' classes: the same weights give the same hidden states, logits, loss and
gradients, in every family that transformers has such a class of.

Some of their classes round to fp32 in fp64 models, too: RMSNorm, rotary positions, DeBERTa's LayerNorm. For fp64 these
are replaced by the same formulas without that rounding. In fp32 they are used as they are.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.deberta.modeling_deberta import DebertaLayerNorm
from transformers.models.eurobert.modeling_eurobert import EuroBertRMSNorm
from transformers.models.modernbert import modeling_modernbert
from transformers.models.ultrabert.modeling_ultrabert import UltrabertRMSNorm

from encoder_core.errors import ModelError
from encoder_core.families.albert import AlbertConfig
from encoder_core.families.bert import BertConfig
from encoder_core.families.catalogue import ModelConfig, hf_format_of, read_config
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.objectives.weights import masked_lm_weight_count
from tests.support.models.parity import assert_same_masked_gradients, assert_same_masked_outputs, make_batch
from tests.support.models.peers import in_both_precisions, peers, unrounded_norm

SIZE: dict[str, Any] = {"layers": 4, "hidden": 48, "heads": 4, "feed_forward": 80, "vocab": 101}
SHORT: dict[str, Any] = SIZE | {"max_length": 40}
LONG: dict[str, Any] = SIZE | {"max_length": 600}
CONFIGS: dict[str, ModelConfig] = {
    "roberta": RobertaConfig(**SHORT, pad_id=7),
    "roberta of another activation": RobertaConfig(**SHORT, activation="gelu_tanh", pad_id=0),
    "bert": BertConfig(**SHORT),
    "bert of three segments": BertConfig(**SHORT, activation="gelu_tanh", token_types=3),
    "distilbert": BertConfig(**SHORT, token_types=0),
    "distilbert of another activation": BertConfig(**SHORT, token_types=0, activation="gelu_tanh"),
    "albert": AlbertConfig(**SHORT, embedding=16),
    "albert of groups": AlbertConfig(**SHORT, embedding=16, groups=3, activation="gelu_tanh"),
    # The width of a head is 12: transformers rounds sqrt(3 * 12) = 6 to fp32 without loss.
    "deberta": DebertaConfig(**SHORT, mask_decoder="plain"),
    "deberta v2": DebertaV2Config(**SHORT, buckets=8, mask_decoder="plain"),
    "deberta v2 with a convolution": DebertaV2Config(**SHORT, buckets=8, convolution=3, mask_decoder="plain"),
    "deberta v2, more buckets than tokens": DebertaV2Config(**SHORT, buckets=256, mask_decoder="plain"),
    "modernbert": ModernBertConfig(**LONG, local_attention=16, global_every=3),
    "eurobert": EuroBertConfig(**LONG | {"heads": 6}, key_value_heads=2),
    "ultrabert": EuroBertConfig(
        **LONG | {"heads": 6}, key_value_heads=2, rotary_base=2_560_000.0, local_attention=16, head_width=24
    ),
    "ultrabert with a tied decoder": EuroBertConfig(
        **LONG | {"heads": 6}, local_attention=16, head_width=24, tied_decoder=True
    ),
}
LENGTHS = {
    "short": [17, 40, 3, 1, 28],
    "full": [24, 24],
    "at the window's edges": [1, 2, 7, 8, 9, 10, 15, 16, 17, 18],
    "at the edges of blocks": [63, 64, 65, 72, 73, 127, 128, 129],
    "mixed": [300, 1, 40, 3, 511],
    "one long": [600],
}
CASES = [
    (name, lengths)
    for name, config in CONFIGS.items()
    for lengths, rows in LENGTHS.items()
    if max(rows) <= config.max_length and (config.max_length > 40 or lengths in ("short", "full"))
]


def _unrounded_rotation(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    half = modeling_modernbert.rotate_half
    return q * cos + half(q) * sin, k * cos + half(k) * sin


@pytest.fixture(scope="module", autouse=True)
def unrounded() -> Iterator[None]:
    """Their fp64 models are exact; see above."""
    rotation, norm = modeling_modernbert.apply_rotary_pos_emb, DebertaLayerNorm.forward

    def rotate(q: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        return (_unrounded_rotation if q.dtype == torch.float64 else rotation)(q, *rest, **named)

    def normed(self: DebertaLayerNorm, x: Tensor) -> Tensor:
        if x.dtype != torch.float64:
            rounded: Tensor = norm(self, x)
            return rounded
        return torch.nn.functional.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.variance_epsilon)

    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(modeling_modernbert, "apply_rotary_pos_emb", rotate)
        patch.setattr(DebertaLayerNorm, "forward", normed)
        for theirs in (EuroBertRMSNorm, UltrabertRMSNorm):
            stack.enter_context(unrounded_norm(theirs))
        yield


@torch.no_grad()
@in_both_precisions
@pytest.mark.parametrize(("name", "lengths"), CASES)
def test_same_weights_same_outputs(name: str, lengths: str, dtype: torch.dtype) -> None:
    config = CONFIGS[name]
    ours, theirs = peers(config, dtype)
    assert_same_masked_outputs(ours, theirs, make_batch(LENGTHS[lengths], config.vocabulary_size), config.pad_id)


@pytest.mark.parametrize("name", CONFIGS)
def test_same_gradients(name: str) -> None:
    """After our weights were copied into theirs, as an export does."""
    config = CONFIGS[name]
    ours, theirs = peers(config, torch.float64)
    for lengths in ("short", "at the window's edges", "mixed"):
        if max(LENGTHS[lengths]) <= config.max_length:
            ours.zero_grad()
            theirs.zero_grad()
            assert_same_masked_gradients(ours, theirs, make_batch(LENGTHS[lengths], 101), config)


@st.composite
def shapes(draw: st.DrawFn, family: str) -> ModelConfig:
    shared, times, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 6))
    shape: dict[str, Any] = {
        "layers": draw(st.integers(1, 5)),
        "hidden": shared * times * width,
        "heads": shared * times,
        "feed_forward": draw(st.integers(1, 40)),
        "vocab": draw(st.integers(20, 60)),
        "pad_id": draw(st.integers(0, 7)),
        "layer_norm_eps": draw(st.sampled_from([1e-5, 1e-6])),
    }
    if family == "modernbert":
        return ModernBertConfig(
            **shape,
            activation=draw(st.sampled_from(["gelu", "gelu_tanh"])),
            local_attention=2 * draw(st.integers(1, 20)),
            global_every=draw(st.integers(1, 4)),
            global_rope_base=draw(st.sampled_from([10_000.0, 160_000.0])),
            local_rope_base=draw(st.sampled_from([100.0, 10_000.0])),
        )
    shape |= {"key_value_heads": shared if times > 1 else None, "tied_decoder": draw(st.booleans())}
    if family == "ultrabert":
        return EuroBertConfig(
            **shape,
            rotary_base=draw(st.sampled_from([10_000.0, 2_560_000.0])),
            local_rope_base=draw(st.sampled_from([100.0, 10_000.0])),
            local_attention=2 * draw(st.integers(1, 70)),
            head_width=draw(st.integers(1, 30)),
        )
    return EuroBertConfig(
        **shape,
        activation=draw(st.sampled_from(["silu", "gelu", "gelu_tanh"])),
        rotary_base=draw(st.sampled_from([100.0, 10_000.0, 250_000.0])),
    )


modern = st.sampled_from(["modernbert", "eurobert", "ultrabert"]).flatmap(shapes)


@torch.no_grad()
@settings(max_examples=24)
@given(config=modern, lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5))
def test_any_shape_and_any_rows_in_fp64(config: ModelConfig, lengths: list[int]) -> None:
    ours, theirs = peers(config, torch.float64)
    assert sum(parameter.numel() for parameter in ours.parameters()) == masked_lm_weight_count(config)
    assert_same_masked_outputs(ours, theirs, make_batch(lengths, config.vocabulary_size), config.pad_id)


@torch.no_grad()
@pytest.mark.long
@in_both_precisions
@pytest.mark.parametrize("name", ["modernbert", "eurobert"])
def test_rows_as_long_as_the_published_models_take(name: str, dtype: torch.dtype) -> None:
    """ModernBERT's at their own window, up to the last position."""
    changes: dict[str, Any] = {"layers": 2, "hidden": 16, "heads": 2, "max_length": 8192}
    changes |= {"local_attention": 128} if name == "modernbert" else {"key_value_heads": 1}
    config = CONFIGS[name].model_copy(update=changes)
    ours, theirs = peers(config, dtype)
    assert_same_masked_outputs(ours, theirs, make_batch([8192, 130], config.vocabulary_size), config.pad_id)


FRESH: dict[str, ModelConfig] = {
    "modernbert": ModernBertConfig(layers=22, hidden=256, heads=4, feed_forward=300, vocab=2000),
    "eurobert": EuroBertConfig(
        layers=2, hidden=256, heads=4, key_value_heads=2, feed_forward=300, vocab=2000, initializer="normal"
    ),
}


@pytest.mark.parametrize("name", FRESH)
def test_fresh_weights_have_their_spread_and_their_cut(name: str) -> None:
    """Every parameter's mean, deviation and, where the draws are cut, largest value; of 22 layers, outputs are 6.6
    times narrower."""
    config, their = FRESH[name], hf_format_of(FRESH[name])
    torch.manual_seed(0)
    ours = masked_language_model(config)
    initialise(ours, config.initializer_range, config.initializer)
    described = transformers.AutoConfig.for_model(**their.fields)
    theirs = dict(getattr(transformers, str(their.architecture))(described).named_parameters())
    names = their.table.their_names(their.layers)
    for name, parameter in ours.named_parameters():
        expected = theirs[names[name]]
        torch.testing.assert_close(parameter.std(), expected.std(), rtol=0.02, atol=0, msg=name)
        torch.testing.assert_close(parameter.mean(), expected.mean(), rtol=0, atol=5e-4, msg=name)
        if config.initializer != "normal":
            most, wanted = parameter.abs().max(), expected.abs().max()
            torch.testing.assert_close(most, wanted, rtol=0.02, atol=0, msg=name)


@given(config=modern)
def test_both_forms_of_their_config_are_read(config: ModelConfig) -> None:
    """The released models' form, which we write, and version 5's, which names each layer's type and its base."""
    fields = hf_format_of(config).fields
    assert read_config(fields) == config
    saved = transformers.AutoConfig.for_model(**fields).to_dict()
    assert "rope_theta" not in saved
    if isinstance(config, ModernBertConfig):  # with no second global layer, any period is the same model
        assert "layer_types" in saved
        config = config.model_copy(update={"global_every": min(config.global_every, config.layers)})
    assert read_config(saved) == config


@settings(max_examples=40)
@given(config=shapes("ultrabert"))
def test_an_ultrabert_with_a_window_and_a_base_for_each_layer_is_read(config: EuroBertConfig) -> None:
    """As files published before transformers' class state them."""
    fields = hf_format_of(config).fields
    kinds, bases = fields.pop("layer_types"), fields.pop("rope_parameters")
    listed = {
        "attention_windows": [fields["sliding_window"] if kind == "sliding_attention" else None for kind in kinds],
        "sliding_window": 1,
        "rope_theta": [bases[kind]["rope_theta"] for kind in kinds],
    }
    expected = config if config.layers > 2 else config.model_copy(update={"rotary_base": 2_560_000.0})
    assert read_config(fields | listed) == expected


def test_what_an_ultraberts_file_leaves_out_is_transformers_own() -> None:
    found = read_config({"model_type": "ultrabert", "num_hidden_layers": 3})
    assert isinstance(found, EuroBertConfig)
    assert [found.window(layer) for layer in range(3)] == [128, 128, None]
    assert [found.rope_base(layer) for layer in range(3)] == [10_000.0, 10_000.0, 2_560_000.0]
    assert (found.max_length, found.head_width, found.tied_decoder) == (32_768, 768, False)


def test_distilberts_configuration_comes_back() -> None:
    config = CONFIGS["distilbert"]
    its = hf_format_of(config)
    assert read_config(transformers.DistilBertConfig(**its.fields).to_dict()) == config
    assert (its.architecture, hf_format_of(config, "none").architecture) == (
        "DistilBertForMaskedLM",
        "DistilBertModel",
    )
    with pytest.raises(ModelError, match="1e-12"):
        hf_format_of(config.model_copy(update={"layer_norm_eps": 1e-5}))


REFUSED: dict[str, list[dict[str, Any]]] = {
    "modernbert": [
        {"norm_bias": True},
        {"decoder_bias": False},
        {"mlp_bias": True},
        {"tie_word_embeddings": False},
        {"hidden_activation": "relu", "classifier_activation": "relu"},
        {"classifier_activation": "gelu_new"},
        {"layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]},
        {"layer_types": ["sliding_attention"] * 4},
        {"layer_types": ["full_attention"] * 3},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}},
    ],
    "eurobert": [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "relu"},
        {"head_dim": 64},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    ],
    "ultrabert": [
        {"layer_types": ["full_attention"] * 4},
        {"attention_windows": [8, 4, None, 8]},
        {"rope_theta": [1.0, 2.0, 3.0, 1.0], "rope_parameters": None},
        {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
        {"attention_bias": True},
    ],
}


@pytest.mark.parametrize(
    ("name", "change"), [(name, change) for name, changes in REFUSED.items() for change in changes], ids=str
)
def test_what_we_do_not_have_is_refused(name: str, change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(change))):
        read_config(hf_format_of(CONFIGS[name]).fields | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"key_value_heads": 4}, r"\bheads \(6\).*key_value_heads \(4\)"),
        ({"local_attention": 16}, "local_attention and head_width"),
    ],
)
def test_a_eurobert_that_cannot_be_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EuroBertConfig.model_validate({"layers": 1, "hidden": 48, "heads": 6, "feed_forward": 8} | change)
