"""EuroBERT against transformers: the same weights give the same hidden states, logits, loss and gradients.

transformers computes RMSNorm in fp32, in fp64 models too. In fp64 tests its function is replaced by the same formula
without that rounding. The fp32 tests use it as it is.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import EuroBertConfig as TheirConfig
from transformers import EuroBertForMaskedLM
from transformers.models.eurobert.modeling_eurobert import EuroBertRMSNorm

from encoder_core.errors import ModelError
from encoder_core.families.catalogue import interchange, read_config
from encoder_core.families.eurobert import EuroBertConfig
from encoder_core.layers.attention import Attend, blocked, padded_sdpa
from encoder_core.layers.initialise import initialise
from encoder_core.objectives.modules.network import masked_language_model
from tests.support.models.parity import (
    assert_same_masked_gradients,
    assert_same_masked_outputs,
    make_batch,
)
from tests.support.models.peers import (
    Direction,
    in_both_directions,
    in_both_precisions,
    peers,
    unrounded_norm,
)
from tests.support.models.plain_attention import reference

CONFIG = EuroBertConfig(
    layers=3, hidden=48, heads=6, key_value_heads=2, feed_forward=80, max_length=600, vocab=101
)
LENGTHS = {
    "short": [1, 2, 3, 17],
    "at the edges of blocks": [63, 64, 65, 127, 128, 129],
    "mixed": [300, 1, 40, 3, 511],
    "one long": [600],
}


@pytest.fixture(scope="module", autouse=True)
def unrounded() -> Any:
    """Their fp64 models are exact; see above."""
    with unrounded_norm(EuroBertRMSNorm):
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
def shapes(draw: st.DrawFn) -> EuroBertConfig:
    shared, times, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 6))
    return EuroBertConfig(
        layers=draw(st.integers(1, 4)),
        hidden=shared * times * width,
        heads=shared * times,
        key_value_heads=shared if times > 1 else None,
        feed_forward=draw(st.integers(1, 40)),
        vocab=draw(st.integers(20, 60)),
        pad_id=draw(st.integers(0, 7)),
        activation=draw(st.sampled_from(["silu", "gelu", "gelu_tanh"])),
        layer_norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        rotary_base=draw(st.sampled_from([100.0, 10_000.0, 250_000.0])),
        tied_decoder=draw(st.booleans()),
    )


@settings(max_examples=12, deadline=None)
@given(config=shapes(), lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5))
def test_any_shape_and_any_rows_in_fp64(config: EuroBertConfig, lengths: list[int]) -> None:
    ours, theirs = peers(config, torch.float64)
    with torch.no_grad():
        assert_same_masked_outputs(ours, theirs, make_batch(lengths, config.vocabulary), config.pad_id)


@pytest.mark.long
@in_both_precisions
def test_rows_as_long_as_the_published_models_take(dtype: torch.dtype) -> None:
    config = CONFIG.model_copy(
        update={"layers": 2, "hidden": 16, "heads": 2, "key_value_heads": 1, "max_length": 8192}
    )
    ours, theirs = peers(config, dtype)
    with torch.no_grad():
        assert_same_masked_outputs(ours, theirs, make_batch([8192, 130], config.vocabulary), 0)


@pytest.mark.parametrize("lengths", [*LENGTHS.values()][:3], ids=[*LENGTHS][:3])
def test_same_gradients(lengths: list[int]) -> None:
    ours, theirs = peers(CONFIG, torch.float64)
    assert_same_masked_gradients(ours, theirs, make_batch(lengths, CONFIG.vocabulary), CONFIG)


def test_fresh_weights_have_their_spread() -> None:
    """But for their embedding's row of padding, which is zero."""
    config = EuroBertConfig(
        layers=2, hidden=256, heads=4, key_value_heads=2, feed_forward=300, vocab=2000, initializer="normal"
    )
    torch.manual_seed(0)
    ours = masked_language_model(config)
    initialise(ours, config.initializer_range, config.initializer)
    their = interchange(config)
    theirs = dict(EuroBertForMaskedLM(TheirConfig(**their.fields)).named_parameters())
    names = their.table.names(their.layers)
    for name, parameter in ours.named_parameters():
        expected = theirs[names[name]]
        torch.testing.assert_close(parameter.std(), expected.std(), rtol=0.02, atol=0, msg=name)
        torch.testing.assert_close(parameter.mean(), expected.mean(), rtol=0, atol=5e-4, msg=name)


@settings(max_examples=40, deadline=None)
@given(config=shapes())
def test_both_forms_of_their_config_are_read(config: EuroBertConfig) -> None:
    """The released models' form, which we write, and version 5's."""
    fields = interchange(config).fields
    assert read_config(fields) == config
    saved = TheirConfig(**fields).to_dict()
    assert "rope_theta" not in saved
    assert read_config(saved) == config


@pytest.mark.parametrize(
    "change",
    [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "relu"},
        {"head_dim": 64},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
    ],
    ids=str,
)
def test_what_we_do_not_have_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(change))):
        read_config(interchange(CONFIG).fields | change)


def test_heads_that_cannot_share_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\bheads \(6\).*key_value_heads \(4\)"):
        EuroBertConfig(layers=1, hidden=48, heads=6, key_value_heads=4, feed_forward=8)
