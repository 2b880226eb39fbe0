"""ModernBERT against transformers: the same weights give the same hidden states, logits, loss and gradients.

transformers rounds queries and keys to fp32 where it turns them, in fp64 models too. In fp64 tests its function is
replaced by the same formula without that rounding. The fp32 tests use it as it is.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import ModernBertConfig as TheirConfig
from transformers import ModernBertForMaskedLM
from transformers.models.modernbert import modeling_modernbert

from encoder_core.errors import ModelError
from encoder_core.families.catalogue import interchange, read_config
from encoder_core.families.modernbert import ModernBertConfig
from encoder_core.layers.attention import Attend, blocked, padded_sdpa
from encoder_core.layers.initialise import initialise
from encoder_core.layers.rows import Rows, rotate, rotation
from encoder_core.objectives.modules.network import masked_language_model
from tests.support.models.parity import (
    assert_same_masked_gradients,
    assert_same_masked_outputs,
    make_batch,
    random_weights,
)
from tests.support.models.peers import Direction, in_both_directions, in_both_precisions, peers
from tests.support.models.plain_attention import reference

CONFIG = ModernBertConfig(
    layers=4,
    hidden=48,
    heads=4,
    feed_forward=80,
    max_length=600,
    vocab=101,
    local_attention=16,
    global_every=3,
)
LENGTHS = {
    "at the window's edges": [1, 2, 7, 8, 9, 10, 15, 16, 17, 18],
    "at the edges of blocks": [63, 64, 65, 72, 73, 127, 128, 129],
    "mixed": [300, 1, 40, 3, 511],
    "one long": [600],
}


def exact_rotary(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1
) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    half = modeling_modernbert.rotate_half
    return q * cos + half(q) * sin, k * cos + half(k) * sin


@pytest.fixture(scope="module", autouse=True)
def unrounded() -> Any:
    """Their fp64 models are exact; see above."""
    theirs = modeling_modernbert.apply_rotary_pos_emb

    def chosen(q: Tensor, *rest: Any, **named: Any) -> tuple[Tensor, Tensor]:
        return (exact_rotary if q.dtype == torch.float64 else theirs)(q, *rest, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_modernbert, "apply_rotary_pos_emb", chosen)
        yield


@in_both_precisions
@in_both_directions
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_same_weights_same_outputs(dtype: torch.dtype, direction: Direction, lengths: list[int]) -> None:
    ours, theirs = peers(CONFIG, dtype, direction)
    with torch.no_grad():
        assert_same_masked_outputs(ours, theirs, make_batch(lengths, CONFIG.vocabulary), 7)


@pytest.mark.parametrize("attend", [blocked, padded_sdpa, reference], ids=lambda kernel: kernel.__name__)
def test_the_same_with_every_kernel(attend: Attend) -> None:
    ours, theirs = peers(CONFIG, torch.float64, attend=attend)
    with torch.no_grad():
        assert_same_masked_outputs(ours, theirs, make_batch([1, 9, 40, 200], CONFIG.vocabulary), 7)


@st.composite
def shapes(draw: st.DrawFn) -> ModernBertConfig:
    heads, width = draw(st.integers(1, 3)), 2 * draw(st.integers(1, 6))
    return ModernBertConfig(
        layers=draw(st.integers(1, 5)),
        hidden=heads * width,
        heads=heads,
        feed_forward=draw(st.integers(1, 40)),
        vocab=draw(st.integers(20, 60)),
        pad_id=draw(st.integers(0, 7)),
        activation=draw(st.sampled_from(["gelu", "gelu_tanh"])),
        layer_norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        local_attention=2 * draw(st.integers(1, 20)),
        global_every=draw(st.integers(1, 4)),
        global_rope_base=draw(st.sampled_from([10_000.0, 160_000.0])),
        local_rope_base=draw(st.sampled_from([100.0, 10_000.0])),
    )


@settings(max_examples=12, deadline=None)
@given(config=shapes(), lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5))
def test_any_shape_and_any_rows_in_fp64(config: ModernBertConfig, lengths: list[int]) -> None:
    ours, theirs = peers(config, torch.float64)
    with torch.no_grad():
        assert_same_masked_outputs(ours, theirs, make_batch(lengths, config.vocabulary), config.pad_id)


@pytest.mark.long
@in_both_precisions
def test_rows_as_long_as_the_published_models_take(dtype: torch.dtype) -> None:
    """At their own window, up to the last position."""
    config = CONFIG.model_copy(
        update={"layers": 2, "hidden": 16, "heads": 1, "local_attention": 128, "max_length": 8192}
    )
    ours, theirs = peers(config, dtype)
    with torch.no_grad():
        assert_same_masked_outputs(ours, theirs, make_batch([8192, 130], config.vocabulary), 0)


@pytest.mark.parametrize("lengths", [*LENGTHS.values()][:3], ids=[*LENGTHS][:3])
def test_same_gradients(lengths: list[int]) -> None:
    ours, theirs = peers(CONFIG, torch.float64)
    assert_same_masked_gradients(ours, theirs, make_batch(lengths, CONFIG.vocabulary), CONFIG)


def test_a_token_sees_its_window_and_no_further_row() -> None:
    """One local layer: what a change at one token moves is its row within the window."""
    config = CONFIG.model_copy(update={"layers": 2, "global_every": 9, "local_attention": 16})
    model = random_weights(masked_language_model(config)).double().eval()
    layer = model.encoder.layers[1]
    batch = make_batch([30, 200, 11], config.vocabulary)
    rows = Rows.from_batch(batch)
    states = torch.randn(len(batch.tokens), config.hidden, dtype=torch.float64)
    moved = states.clone()
    moved[130] = torch.randn(config.hidden)
    with torch.no_grad():
        changed = (layer(states, rows) != layer(moved, rows)).any(-1).nonzero().flatten().tolist()
    assert changed == list(range(122, 139))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("base", [10_000.0, 160_000.0])
def test_rotary_positions_are_theirs_to_the_bit(base: float, dtype: torch.dtype) -> None:
    config = TheirConfig(hidden_size=64, num_attention_heads=2, global_rope_theta=base, local_rope_theta=base)
    positions = torch.randint(8192, (1, 50))
    q, k = torch.randn(2, 1, 2, 50, 32).to(dtype)
    cos, sin = modeling_modernbert.ModernBertRotaryEmbedding(config)(
        q.float(), positions, layer_type="full_attention"
    )
    expected = modeling_modernbert.apply_rotary_pos_emb(q, k, cos, sin)
    by = rotation(positions[0], base, 32)
    for ours, theirs in zip((q, k), expected, strict=True):
        assert torch.equal(rotate(ours[0].transpose(0, 1), by), theirs[0].transpose(0, 1))


def test_fresh_weights_have_their_spread_and_their_cut() -> None:
    """Every parameter's deviation and largest value, against their class: of 22 layers, outputs 6.6 times narrower."""
    config = ModernBertConfig(layers=22, hidden=256, heads=4, feed_forward=300, vocab=2000)
    torch.manual_seed(0)
    ours = masked_language_model(config)
    initialise(ours, config.initializer_range, config.initializer)
    theirs = dict(ModernBertForMaskedLM(TheirConfig(**interchange(config).fields)).named_parameters())
    their = interchange(config)
    names = their.table.names(their.layers)
    for name, parameter in ours.named_parameters():
        expected = theirs[names[name]]
        torch.testing.assert_close(parameter.std(), expected.std(), rtol=0.02, atol=0, msg=name)
        torch.testing.assert_close(parameter.abs().max(), expected.abs().max(), rtol=0.02, atol=0, msg=name)


@settings(max_examples=40, deadline=None)
@given(config=shapes())
def test_both_forms_of_their_config_are_read(config: ModernBertConfig) -> None:
    """The released models' form, which we write, and version 5's, which names each layer's type."""
    fields = interchange(config).fields
    assert read_config(fields) == config
    theirs = TheirConfig(**fields)
    saved = theirs.to_dict()
    assert "layer_types" in saved
    again = read_config(saved)
    period = min(
        config.global_every, config.layers
    )  # with no second global layer, any period is the same model
    assert again == config.model_copy(update={"global_every": period})


@pytest.mark.parametrize(
    "change",
    [
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
    ids=str,
)
def test_what_we_do_not_have_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(change))):
        read_config(interchange(CONFIG).fields | change)
