"""NeoBERT against its formulas, written here once more without any part of ours: the same weights give the same hidden
states, logits, loss and gradients. transformers has no class for it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from encoder_core.batch import Batch
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import interchange, read_config
from encoder_core.families.neobert import BASE, NeoBertConfig
from encoder_core.layers.initialise import on_meta
from encoder_core.objectives.multitask import MultitaskModel
from encoder_core.objectives.network import masked_language_model
from tests.support.models.parity import assert_close, copy_from, copy_into, make_batch, random_weights

CONFIG = NeoBertConfig(layers=3, hidden=48, heads=6, feed_forward=80, max_length=600, vocab=101)
LENGTHS = {
    "short": [1, 2, 3, 17],
    "at the edges of blocks": [63, 64, 65, 127, 128, 129],
    "mixed": [300, 1, 40, 3, 511],
}


class Norm(nn.Module):
    """x / rms(x) * weight (Zhang and Sennrich, 2019, formula 4)."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(hidden)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


class SwiGlu(nn.Module):
    """w3 (silu(w1 x) * w2 x) (Shazeer, 2020, formula 6)."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.w3 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w3(silu(self.w1(x)) * self.w2(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: NeoBertConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.heads, self.base = config.heads, config.rotary_base
        self.q, self.k, self.v, self.wo = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.ffn = SwiGlu(hidden, config.feed_forward)
        self.attention_norm, self.ffn_norm = (Norm(hidden, config.layer_norm_eps) for _ in range(2))

    def turned(self, x: Tensor) -> Tensor:
        """Numbers i and i + half of a head are one complex number, turned by position * base^(-i / half). Angles are in
        fp32, as everywhere."""
        half = x.shape[-1] // 2
        angles = torch.arange(len(x))[:, None] * (1 / self.base ** (torch.arange(half) / half))
        turn = torch.complex(angles.cos().double(), angles.sin().double())
        turned = torch.complex(x[..., :half].double(), x[..., half:].double()) * turn[:, None]
        return torch.cat([turned.real, turned.imag], -1).to(x)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.attention_norm(x)
        q, k, v = (project(normed).unflatten(-1, (self.heads, -1)) for project in (self.q, self.k, self.v))
        scores = torch.einsum("qnd,knd->nqk", self.turned(q), self.turned(k)) / q.shape[-1] ** 0.5
        x = x + self.wo(torch.einsum("nqk,knd->qnd", scores.softmax(-1), v).flatten(1))
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Body(nn.Module):
    """The encoder, its parts by their published names."""

    def __init__(self, config: NeoBertConfig) -> None:
        super().__init__()
        self.encoder = nn.Embedding(config.vocabulary, config.hidden)
        self.transformer_encoder = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.layer_norm = Norm(config.hidden, config.layer_norm_eps)


class Written(nn.Module):
    """The paper's model for one row after the other: [length] to states [length, hidden] and logits [length, vocab]."""

    def __init__(self, config: NeoBertConfig) -> None:
        super().__init__()
        self.model = Body(config)
        self.decoder = nn.Linear(config.hidden, config.vocabulary)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        rows = []
        for tokens in batch.tokens.tensor_split(batch.cu_seqlens[1:-1].long()):
            x = self.model.encoder(tokens)
            for layer in self.model.transformer_encoder:
                x = layer(x)
            rows.append(self.model.layer_norm(x))
        states = torch.cat(rows)
        return states, self.decoder(states)


def both(config: NeoBertConfig, dtype: torch.dtype, direction: str) -> tuple[MultitaskModel, Written]:
    ours = random_weights(masked_language_model(config), seed=1).to(dtype).eval()
    theirs = random_weights(Written(config)).to(dtype).eval()
    copy = copy_from if direction == "theirs_to_ours" else copy_into
    copy(theirs, ours, interchange(config))
    return ours, theirs


def loss_of(logits: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(logits[batch.target_positions], batch.target_ids, reduction="sum")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("direction", ["theirs_to_ours", "ours_to_theirs"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_same_weights_same_outputs(dtype: torch.dtype, direction: str, lengths: list[int]) -> None:
    ours, theirs = both(CONFIG, dtype, direction)
    batch = make_batch(lengths, CONFIG.vocabulary)
    with torch.no_grad():
        states, logits = theirs(batch)
        assert_close(ours.encoder(batch), states)
        assert_close(ours.logits(batch), logits[batch.target_positions])
        assert_close(ours(batch).terms[0].loss_sum.to(dtype), loss_of(logits, batch))


@st.composite
def shapes(draw: st.DrawFn) -> NeoBertConfig:
    heads, width = draw(st.integers(1, 4)), 2 * draw(st.integers(1, 6))
    return NeoBertConfig(
        layers=draw(st.integers(1, 4)),
        hidden=heads * width,
        heads=heads,
        feed_forward=draw(st.integers(1, 40)),
        vocab=draw(st.integers(20, 60)),
        layer_norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        rotary_base=draw(st.sampled_from([100.0, 10_000.0])),
    )


@settings(max_examples=12, deadline=None)
@given(config=shapes(), lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5))
def test_any_shape_and_any_rows_in_fp64(config: NeoBertConfig, lengths: list[int]) -> None:
    ours, theirs = both(config, torch.float64, "theirs_to_ours")
    batch = make_batch(lengths, config.vocabulary)
    with torch.no_grad():
        assert_close(ours.encoder(batch), theirs(batch)[0])


def test_same_gradients() -> None:
    ours, theirs = both(CONFIG, torch.float64, "theirs_to_ours")
    batch = make_batch(LENGTHS["mixed"], CONFIG.vocabulary)
    ours(batch).terms[0].loss_sum.backward()
    loss_of(theirs(batch)[1], batch).backward()
    names, expected = interchange(CONFIG).table.names(CONFIG.layers), dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        found, wanted = parameter.grad, expected[names[name]].grad
        assert found is not None
        assert wanted is not None
        torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-8, msg=name)


def test_the_published_size() -> None:
    """198 M in its layers, about 250 M in all (section 3.1)."""
    with on_meta():
        model = masked_language_model(BASE)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == 2 * 30_522 * 768 + 30_522 + 28 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768
    assert 240e6 < count < 250e6


@settings(max_examples=20, deadline=None)
@given(config=shapes())
def test_its_config_reads_back(config: NeoBertConfig) -> None:
    assert read_config(interchange(config).fields) == config


def test_the_authors_own_files_are_refused() -> None:
    """Their rows lie in another order, which no name tells."""
    fields = interchange(CONFIG).fields
    del fields["inner_size"]
    with pytest.raises(ModelError, match="inner_size"):
        read_config(fields | {"intermediate_size": 3072})
