"""UltraBERT, read as a EuroBERT with windows and a head of two Linears: against its formulas, written here once more
without any part of ours. Against transformers' class: test_masked.py.

Angles are in fp32 everywhere, so that fp64 models agree with the formulas to 1e-12.
"""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import gelu, silu

from encoder_core.families.catalogue import hf_format_of, read_config
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.objectives.weights import masked_lm_weight_count
from tests.support.models.parity import make_batch, parameters_of, random_weights


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def turned(x: Tensor, base: float) -> Tensor:
    """[length, heads, width]: numbers i and i + half of a head are turned by position * base^(-i / half)."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * (1 / base ** (torch.arange(half) / half))
    turn = torch.complex(angles.cos().to(x), angles.sin().to(x))[:, None]
    both = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([both.real, both.imag], -1)


def logits_of(w: dict[str, Tensor], fields: dict[str, Any], tokens: Tensor) -> Tensor:
    """One row's logits [length, vocab], from their weights and config.json."""
    eps, width = fields["rms_norm_eps"], fields["hidden_size"] // fields["num_attention_heads"]
    place = torch.arange(len(tokens))
    x = w["model.embed_tokens.weight"][tokens]
    for number, kind in enumerate(fields["layer_types"]):
        at = f"model.layers.{number}."
        base = fields["rope_parameters"][kind]["rope_theta"]
        normed = norm(x, w[f"{at}input_layernorm.weight"], eps)
        q, k, v = ((normed @ w[f"{at}self_attn.{n}_proj.weight"].T).unflatten(-1, (-1, width)) for n in "qkv")
        k, v = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (turned(k, base), v))
        scores = torch.einsum("qnd,knd->nqk", turned(q, base), k) / width**0.5
        if kind == "sliding_attention":
            far = (place[:, None] - place).abs() > fields["sliding_window"]
            scores = scores.masked_fill(far, -torch.inf)
        context = torch.einsum("nqk,knd->qnd", scores.softmax(-1), v).flatten(1)
        x = x + context @ w[f"{at}self_attn.o_proj.weight"].T
        normed = norm(x, w[f"{at}post_attention_layernorm.weight"], eps)
        inner = silu(normed @ w[f"{at}mlp.gate_proj.weight"].T) * (normed @ w[f"{at}mlp.up_proj.weight"].T)
        x = x + inner @ w[f"{at}mlp.down_proj.weight"].T
    x = norm(x, w["model.norm.weight"], eps)
    for linear in ("linear1", "linear2"):
        x = gelu(x @ w[f"head.{linear}.weight"].T, approximate="tanh")
    return x @ w.get("head.decoder.weight", w["model.embed_tokens.weight"]).T


@st.composite
def shapes(draw: st.DrawFn) -> EuroBertConfig:
    shared, times, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 6))
    return EuroBertConfig(
        layers=draw(st.integers(1, 7)),
        hidden=shared * times * width,
        heads=shared * times,
        key_value_heads=shared if times > 1 else None,
        feed_forward=draw(st.integers(1, 40)),
        vocab=draw(st.integers(20, 60)),
        layer_norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        rotary_base=draw(st.sampled_from([10_000.0, 2_560_000.0])),
        local_rope_base=draw(st.sampled_from([100.0, 10_000.0])),
        local_attention=2 * draw(st.integers(1, 70)),
        head_width=draw(st.integers(1, 30)),
        tied_decoder=draw(st.booleans()),
    )


@settings(max_examples=12, deadline=None)
@given(config=shapes(), lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5))
def test_any_shape_and_any_rows_in_fp64(config: EuroBertConfig, lengths: list[int]) -> None:
    ours = random_weights(masked_language_model(config)).double().eval()
    assert sum(parameter.numel() for parameter in ours.parameters()) == masked_lm_weight_count(config)
    its, batch = hf_format_of(config), make_batch(lengths, config.vocabulary_size)
    weights = its.table.pack(parameters_of(ours).__getitem__, its.layers)
    rows = batch.tokens.tensor_split(batch.cu_seqlens[1:-1].long())
    with torch.no_grad():
        expected = torch.cat([logits_of(weights, its.fields, row) for row in rows])[batch.target_positions]
        assert (ours.logits(batch) - expected).abs().max() <= 1e-12 * expected.abs().max()


@settings(max_examples=40, deadline=None)
@given(config=shapes())
def test_all_forms_of_its_config_are_read(config: EuroBertConfig) -> None:
    """The one that transformers writes, and the one with a window and a base for each layer."""
    fields = hf_format_of(config).fields
    assert read_config(fields) == config
    kinds = fields.pop("layer_types")
    windows = [fields["sliding_window"] if kind == "sliding_attention" else None for kind in kinds]
    bases = fields.pop("rope_parameters")
    listed = {
        "attention_windows": windows,
        "sliding_window": 1,
        "rope_theta": [bases[kind]["rope_theta"] for kind in kinds],
    }
    expected = config if config.layers > 2 else config.model_copy(update={"rotary_base": 2_560_000.0})
    assert read_config(fields | listed) == expected


def test_what_the_file_leaves_out_is_transformers_own() -> None:
    found = read_config({"model_type": "ultrabert", "num_hidden_layers": 3})
    assert isinstance(found, EuroBertConfig)
    assert [found.window(layer) for layer in range(3)] == [128, 128, None]
    assert [found.rope_base(layer) for layer in range(3)] == [10_000.0, 10_000.0, 2_560_000.0]
    assert (found.max_length, found.head_width, found.tied_decoder) == (32_768, 768, False)
