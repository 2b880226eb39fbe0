"""DeBERTa v1 and v2/v3 against transformers with the plain decoder; the enhanced one against its formula."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForMaskedLM, PreTrainedModel
from transformers.models.deberta import modeling_deberta
from transformers.models.deberta_v2.modeling_deberta_v2 import make_log_bucket_position

from encoder_core.errors import ModelError
from encoder_core.families.catalogue import interchange, read_config
from encoder_core.families.deberta import DebertaConfig, DebertaV2Config
from encoder_core.layers.deberta_attention import (
    AttendDisentangled,
    FusedProjections,
    SharedProjections,
    automatic,
    padded,
)
from encoder_core.layers.deberta_encoder import DisentangledEncoder, DisentangledLayer
from encoder_core.layers.sizes import log_buckets
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.objectives.modules.network import masked_language_model
from tests.support.models import official
from tests.support.models.parity import (
    assert_close,
    copy_from,
    copy_into,
    gradients_of,
    make_batch,
    pad,
    random_weights,
    states_of,
)
from tests.support.models.plain_attention import disentangled_reference

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


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' v1 LayerNorm computes in fp32 whatever it is given; here in the precision of its input."""

    def forward(self: modeling_deberta.DebertaLayerNorm, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.weight, self.bias, self.variance_epsilon)

    monkeypatch.setattr(modeling_deberta.DebertaLayerNorm, "forward", forward)


def their_model(config: Config, dtype: torch.dtype) -> PreTrainedModel:
    their_config = AutoConfig.for_model(**interchange(config).fields)
    return random_weights(AutoModelForMaskedLM.from_config(their_config)).to(dtype).eval()


def our_model(config: Config, dtype: torch.dtype, attend: AttendDisentangled = automatic) -> MultitaskModel:
    model = random_weights(masked_language_model(config))
    for layer in model.encoder.layers:
        assert isinstance(layer, DisentangledLayer)
        layer.attention.attend = attend
    return model.to(dtype).eval()


def check_outputs(ours: MultitaskModel, theirs: nn.Module, lengths: list[int]) -> None:
    batch = make_batch(lengths, 101)
    padded_batch = pad(batch, 0)
    expected = theirs(
        padded_batch.input_ids,
        attention_mask=padded_batch.attention_mask,
        labels=padded_batch.labels,
        output_hidden_states=True,
    )
    states = states_of(ours.encoder, batch)
    assert len(states) == len(expected.hidden_states)
    for state, hidden in zip(states, expected.hidden_states, strict=True):
        assert_close(state, padded_batch.flat(hidden))
    assert_close(ours.logits(batch), padded_batch.flat(expected.logits)[batch.target_positions])
    term = ours(batch).terms[0]
    assert_close(term.loss_sum / term.targets, expected.loss)


@pytest.mark.default_cases(16)
@pytest.mark.parametrize("direction", ["theirs_to_ours", "ours_to_theirs"])
@pytest.mark.parametrize("attend", [automatic, padded, disentangled_reference])
@pytest.mark.parametrize("lengths", [LENGTHS, [24, 24]], ids=["ragged", "full"])
def test_same_weights_same_outputs_fp32(
    config: Config, direction: str, attend: AttendDisentangled, lengths: list[int]
) -> None:
    ours, theirs = our_model(config, torch.float32, attend), their_model(config, torch.float32)
    if direction == "theirs_to_ours":
        copy_from(theirs, ours, interchange(config))
    else:
        copy_into(theirs, ours, interchange(config))
    check_outputs(ours, theirs, lengths)


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("attend", [automatic, padded, disentangled_reference])
def test_same_weights_same_outputs_fp64(config: Config, attend: AttendDisentangled) -> None:
    ours, theirs = our_model(config, torch.float64, attend), their_model(config, torch.float64)
    copy_into(theirs, ours, interchange(config))
    check_outputs(ours, theirs, LENGTHS)


@pytest.mark.usefixtures("exact")
def test_same_gradients(config: Config) -> None:
    ours, theirs = our_model(config, torch.float64), their_model(config, torch.float64)
    copy_into(theirs, ours, interchange(config))
    batch = make_batch(LENGTHS, config.vocabulary)
    padded_batch = pad(batch, config.pad_id)
    theirs(
        padded_batch.input_ids, attention_mask=padded_batch.attention_mask, labels=padded_batch.labels
    ).loss.backward()
    term = ours(batch).terms[0]
    (term.loss_sum / term.targets).backward()
    their_parameters = dict(theirs.named_parameters())
    names = interchange(config).table.names(config.layers)
    assert set(names) == {name for name, _ in ours.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, their_parameters[names[name]].grad, rtol=0, atol=1e-8)


@pytest.mark.parametrize("mask_decoder", ["plain", "enhanced"])
def test_configurations_travel_both_ways(config: Config, mask_decoder: str) -> None:
    config = config.model_copy(update={"mask_decoder": mask_decoder})
    assert read_config(interchange(config).fields) == config


def test_a_term_that_transformers_lacks_is_not_handed_to_it(config: Config) -> None:
    with pytest.raises(ModelError, match="position_to_position"):
        interchange(config.model_copy(update={"position_to_position": True}))


@pytest.mark.parametrize(("buckets", "longest"), [(256, 512), (8, 40), (16, 512), (4, 100), (256, 40)])
def test_buckets_are_theirs(buckets: int, longest: int) -> None:
    expected = make_log_bucket_position(torch.arange(longest), buckets, longest).long()
    assert list(log_buckets(buckets, longest)) == expected.tolist()


def literal_decoder(model: MultitaskModel, config: Config, length: int) -> Tensor:
    """He et al. 2021, section 3.2, as microsoft/DeBERTa runs it, for one row: every token a query, no kernel."""
    batch = make_batch([length], 101)
    x = states_of(model.encoder, batch)[-2]
    layer = model.encoder.layers[-1]
    assert isinstance(layer, DisentangledLayer)
    assert model.decoder is not None
    query = x + model.decoder.position.weight[:length]
    for _ in range(2):
        query = literal_layer(model, layer, config, query, x)
    return query


def literal_layer(
    model: MultitaskModel, layer: DisentangledLayer, config: Config, query: Tensor, x: Tensor
) -> Tensor:
    """Queries `query` (the same tokens as `x`) look at `x`, one head and one pair of tokens at a time."""
    length, width = len(x), config.hidden // config.heads
    assert isinstance(model.encoder, DisentangledEncoder)
    table: Tensor = model.encoder.positions.embedding.weight
    projections = layer.attention.projections
    if isinstance(config, DebertaV2Config):
        assert isinstance(projections, SharedProjections)
        assert model.encoder.positions.norm is not None
        table = model.encoder.positions.norm(table)
        q, k, v = projections.query(query), projections.key(x), projections.value(x)
        pq, pk = projections.query(table), projections.key(table)
        span, steps = config.buckets, log_buckets(config.buckets, config.max_length)
    else:
        assert isinstance(projections, FusedProjections)
        w = projections.content.weight.view(config.heads, 3, width, config.hidden)
        q = query @ w[:, 0].reshape(-1, config.hidden).T + projections.query.bias
        k = x @ w[:, 1].reshape(-1, config.hidden).T
        v = x @ w[:, 2].reshape(-1, config.hidden).T + projections.value.bias
        pq, pk = projections.position_query(table), projections.position_key(table)
        span, steps = config.max_length, tuple(range(config.max_length))
    context = torch.zeros_like(x)
    for h in range(config.heads):
        head = slice(h * width, (h + 1) * width)
        scores = torch.zeros(length, length, dtype=x.dtype)
        for i in range(length):
            for j in range(length):
                step = steps[abs(i - j)] * (1 if i >= j else -1)
                place = min(max(step + span, 0), 2 * span - 1)
                scores[i, j] = (
                    q[i, head] @ k[j, head] + q[i, head] @ pk[place, head] + pq[place, head] @ k[j, head]
                )
        context[:, head] = (scores / (3 * width) ** 0.5).softmax(-1) @ v[:, head]
    y = layer.attention_norm(query + layer.attention.output(context))
    out: Tensor = layer.feed_forward_norm(y + layer.feed_forward.down(F.gelu(layer.feed_forward.up(y))))
    return out


@torch.no_grad()
@pytest.mark.parametrize("attend", [automatic, padded, disentangled_reference])
def test_the_enhanced_decoder_is_its_formula(config: Config, attend: AttendDisentangled) -> None:
    config = config.model_copy(update={"mask_decoder": "enhanced"})
    model = our_model(config, torch.float64, attend)
    expected = literal_decoder(model, config, 13)
    batch = make_batch([13], 101)
    assert model.decoder is not None
    assert isinstance(model.encoder, DisentangledEncoder)
    assert_close(model.decoder(model.encoder, batch), expected[batch.target_positions])
    assert_close(model.logits(batch), model.head.logits(expected[batch.target_positions]))


@pytest.mark.usefixtures("exact")
def test_the_enhanced_decoder_is_theirs_run_again_on_their_own_layer() -> None:
    """transformers keeps the decoder's loop, unused (`z_steps`): its v2 layer, on padded rows, with our queries."""
    config = CONFIGS["v2_convolution"].model_copy(update={"mask_decoder": "enhanced"})
    ours = our_model(config, torch.float64)
    theirs = their_model(config, torch.float64)
    their_weights = CONFIGS["v2_convolution"]
    plain = masked_language_model(their_weights).double()
    plain.load_state_dict({k: v for k, v in ours.state_dict().items() if not k.startswith("decoder.")})
    copy_into(theirs, plain, interchange(their_weights))
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
    assert_close(ours.decoder(ours.encoder, batch), expected)


@pytest.mark.parametrize("mask_decoder", ["plain", "enhanced"])
def test_a_batch_without_targets_keeps_every_parameter_in_the_graph(
    config: Config, mask_decoder: str
) -> None:
    config = config.model_copy(update={"mask_decoder": mask_decoder})
    model = our_model(config, torch.float32)
    batch = make_batch([1], 101)
    none = batch.target_ids[:0]
    idle = type(batch)(batch.tokens, batch.cu_seqlens, 1, batch.positions, none, none)
    model(idle).terms[0].loss_sum.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("between_positions", [False, True])
def test_the_last_layer_at_chosen_tokens_is_the_last_layer(
    config: Config, layers: int, between_positions: bool
) -> None:
    config = config.model_copy(update={"layers": layers, "position_to_position": between_positions})
    encoder = our_model(config, torch.float64).encoder
    assert isinstance(encoder, DisentangledEncoder)
    batch = make_batch(LENGTHS, 101)
    expected = encoder(batch)[batch.target_positions]
    torch.testing.assert_close(encoder.at(batch.target_positions, batch), expected, rtol=1e-12, atol=1e-12)


def test_activation_checkpointing_changes_no_bit(config: Config) -> None:
    config = config.model_copy(update={"mask_decoder": "enhanced"})
    batch = make_batch(LENGTHS, 101)
    gradients = []
    for flag in (False, True):
        model = random_weights(masked_language_model(config)).train()
        model.encoder.checkpoint_activations = flag
        torch.manual_seed(7)
        model(batch).terms[0].loss_sum.backward()
        gradients.append(gradients_of(model))
    for name, gradient in gradients[0].items():
        assert torch.equal(gradient, gradients[1][name]), name


# (configuration, backbone parameters in millions: microsoft/DeBERTa's README counts all but the word embeddings)
SIZES = [
    pytest.param(official.DEBERTA_BASE, 100, id="base"),
    pytest.param(official.DEBERTA_LARGE, 350, id="large"),
    pytest.param(official.DEBERTA_XLARGE, 700, id="xlarge"),
    pytest.param(official.DEBERTA_V2_XLARGE, 710, id="v2-xlarge"),
    pytest.param(official.DEBERTA_V2_XXLARGE, 1320, id="v2-xxlarge"),
    pytest.param(official.DEBERTA_V3_XSMALL, 22, id="v3-xsmall"),
    pytest.param(official.DEBERTA_V3_SMALL, 44, id="v3-small"),
    pytest.param(official.DEBERTA_V3_BASE, 86, id="v3-base"),
    pytest.param(official.DEBERTA_V3_LARGE, 304, id="v3-large"),
]


@pytest.mark.parametrize(("published", "millions"), SIZES)
def test_official_sizes(published: Config, millions: float) -> None:
    with torch.device("meta"):
        ours = masked_language_model(published.model_copy(update={"mask_decoder": "plain"}))
        theirs = AutoModelForMaskedLM.from_config(AutoConfig.for_model(**interchange(published).fields))
    count = sum(parameter.numel() for parameter in ours.parameters())
    assert count == sum(parameter.numel() for parameter in theirs.parameters())
    backbone = sum(p.numel() for p in ours.encoder.parameters()) - ours.encoder.embeddings.word.weight.numel()
    assert backbone / 1e6 == pytest.approx(millions, rel=0.05)
