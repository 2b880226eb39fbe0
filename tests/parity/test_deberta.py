"""DeBERTa v1 and v2/v3: the enhanced decoder against its formula, and what is read and written. With the plain decoder
against transformers: test_masked.py."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from encoder_core.errors import ModelError
from encoder_core.families.catalogue import hf_format_of, read_config
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.heads.prediction import EnhancedMaskDecoder
from encoder_core.layers.deberta_attention import FusedProjections
from encoder_core.layers.deberta_encoder import DisentangledEncoder, DisentangledLayer
from encoder_core.layers.sizes import log_buckets
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.objectives.modules.network import masked_language_model
from encoder_core.objectives.modules.states import States
from tests.support.models.parity import assert_close, copy_into, make_batch, pad, random_weights, states_of
from tests.support.models.peers import peers

Config = DebertaConfig | DebertaV2Config

# Head width 12: transformers rounds sqrt(3 * 12) = 6 to fp32 without loss, so fp64 can be compared as fp64.
SHAPE: dict[str, Any] = {
    "layers": 3,
    "hidden": 48,
    "heads": 4,
    "feed_forward": 80,
    "max_length": 40,
    "vocab": 101,
}
LENGTHS = [17, 40, 3, 1, 28]
CONFIGS: dict[str, Config] = {
    "v1": DebertaConfig(**SHAPE, mask_decoder="plain"),
    "v2": DebertaV2Config(**SHAPE, buckets=8, mask_decoder="plain"),
    "v2_convolution": DebertaV2Config(**SHAPE, buckets=8, convolution=3, mask_decoder="plain"),
    "v2_more_buckets_than_tokens": DebertaV2Config(**SHAPE, buckets=256, mask_decoder="plain"),
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> Config:
    return CONFIGS[request.param]


def our_model(config: Config) -> MultitaskModel:
    return random_weights(masked_language_model(config)).double().eval()


@pytest.mark.parametrize("mask_decoder", ["plain", "enhanced"])
def test_configurations_travel_both_ways(config: Config, mask_decoder: str) -> None:
    config = config.model_copy(update={"mask_decoder": mask_decoder})
    assert read_config(hf_format_of(config).fields) == config


def test_a_term_that_transformers_lacks_is_not_handed_to_it(config: Config) -> None:
    with pytest.raises(ModelError, match="position_to_position"):
        hf_format_of(config.model_copy(update={"position_to_position": True}))


@pytest.mark.parametrize(("buckets", "longest"), [(256, 512), (8, 40), (16, 512), (4, 100), (256, 40)])
def test_buckets_are_theirs(buckets: int, longest: int) -> None:
    expected = make_log_bucket_position(torch.arange(longest), buckets, longest).long()
    assert list(log_buckets(buckets, longest)) == expected.tolist()


def literal_decoder(model: MultitaskModel, config: Config, length: int) -> Tensor:
    """As microsoft/DeBERTa runs it, for one row of version 1: every token a query, one head and one pair of tokens at a
    time."""
    x = states_of(model.encoder, make_batch([length], 101))[-2]
    layer, width, span = model.encoder.layers[-1], config.hidden // config.heads, config.max_length
    assert isinstance(layer, DisentangledLayer)
    assert isinstance(model.encoder, DisentangledEncoder)
    projections = layer.attention.projections
    assert isinstance(projections, FusedProjections)
    assert model.decoder is not None
    w = projections.content.weight.view(config.heads, 3, width, config.hidden)
    k = x @ w[:, 1].reshape(-1, config.hidden).T
    v = x @ w[:, 2].reshape(-1, config.hidden).T + projections.value.bias
    table: Tensor = model.encoder.positions.embedding.weight
    pq, pk = projections.position_query(table), projections.position_key(table)
    query = x + model.decoder.position.weight[:length]
    for _ in range(2):
        q = query @ w[:, 0].reshape(-1, config.hidden).T + projections.query.bias
        context = torch.zeros_like(x)
        for h in range(config.heads):
            head = slice(h * width, (h + 1) * width)
            scores = torch.zeros(length, length, dtype=x.dtype)
            for i, j in product(range(length), repeat=2):
                place = min(max(i - j + span, 0), 2 * span - 1)
                keys = k[j, head] + pk[place, head]
                scores[i, j] = q[i, head] @ keys + pq[place, head] @ k[j, head]
            context[:, head] = (scores / (3 * width) ** 0.5).softmax(-1) @ v[:, head]
        y = layer.attention_norm(query + layer.attention.output(context))
        query = layer.feed_forward_norm(y + layer.feed_forward.down(F.gelu(layer.feed_forward.up(y))))
    return query


@torch.no_grad()
def test_the_enhanced_decoder_of_version_1_is_its_formula() -> None:
    config = CONFIGS["v1"].model_copy(update={"mask_decoder": "enhanced"})
    model, batch = our_model(config), make_batch([13], 101)
    expected = literal_decoder(model, config, 13)[batch.target_positions]
    assert model.decoder is not None
    assert isinstance(model.encoder, DisentangledEncoder)
    assert_close(model.decoder.decode(model.encoder, model.encoder.last_layer_input(batch), batch), expected)
    assert_close(model.logits(batch), model.head.logits(expected))


@torch.no_grad()
@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "v1"])
def test_the_enhanced_decoder_is_theirs_run_again_on_their_own_layer(name: str) -> None:
    """He et al. 2021, section 3.2. transformers keeps the decoder's loop, unused (`z_steps`): its last layer, on padded
    rows, with our queries. Their version 1 cannot take them."""
    config = CONFIGS[name]
    enhanced = config.model_copy(update={"mask_decoder": "enhanced"})
    ours, (plain, theirs) = our_model(enhanced), peers(config, torch.float64)
    plain.load_state_dict({k: v for k, v in ours.state_dict().items() if not k.startswith("decoder.")})
    copy_into(theirs, plain, hf_format_of(config))
    batch = make_batch(LENGTHS, 101)
    rectangle = pad(batch, 0)
    base = theirs.deberta
    hidden = base(
        rectangle.input_ids, attention_mask=rectangle.attention_mask, output_hidden_states=True
    ).hidden_states[-2]
    assert ours.decoder is not None
    query = hidden + ours.decoder.position.weight[: hidden.shape[1]]
    for _ in range(2):
        query, _ = base.encoder.layer[-1](
            hidden,
            base.encoder.get_attention_mask(rectangle.attention_mask),
            query_states=query,
            relative_pos=base.encoder.get_rel_pos(hidden),
            rel_embeddings=base.encoder.get_rel_embedding(),
        )
    expected = rectangle.flat(query)[batch.target_positions]
    assert isinstance(ours.encoder, DisentangledEncoder)
    assert_close(ours.decoder.decode(ours.encoder, ours.encoder.last_layer_input(batch), batch), expected)
    assert_close(ours.logits(batch), ours.head.logits(expected))


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("between_positions", [False, True])
def test_the_last_layer_at_chosen_tokens_is_the_last_layer(
    config: Config, layers: int, between_positions: bool
) -> None:
    config = config.model_copy(update={"layers": layers, "position_to_position": between_positions})
    encoder = our_model(config).encoder
    assert isinstance(encoder, DisentangledEncoder)
    batch = make_batch(LENGTHS, 101)
    expected = encoder(batch)[batch.target_positions]
    torch.testing.assert_close(encoder.states_at(batch.target_positions, batch), expected, rtol=1e-12, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("whole", [False, True])
def test_terms_beside_an_enhanced_decoder_read_the_encoders_states(config: Config, layers: int, whole: bool) -> None:
    """Also with a convolution behind the only layer."""
    model = our_model(config.model_copy(update={"layers": layers}))
    batch = make_batch(LENGTHS, 101)
    first = batch.cu_seqlens[:-1].long()
    decoder = EnhancedMaskDecoder(config.max_length, config.hidden).double()
    states = States(model.encoder, decoder, batch, whole=whole)
    assert_close(states.states_at(first, 1), model.encoder(batch)[first])
