"""NeoBERT against its formulas, written here once more without any part of ours, on the authors' layout of weights: the
same weights give the same hidden states, logits, loss and gradients. transformers has no class for it.

Angles are in fp32 on both sides, so that fp64 models agree to 1e-12.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, silu

from checkpoints.hf.headers import check_weights
from checkpoints.hf.load import load_pretrained
from data_service.store.open import open_store
from encoder_core.batch import Batch
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import hf_format_of, read_config
from encoder_core.families.neobert import NeoBertConfig
from encoder_core.layers.initialise import on_meta
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.objectives.modules.network import masked_language_model
from tests.support.models import official
from tests.support.models.parity import assert_close, copy_from, copy_into, gradients_of, make_batch, random_weights

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
    """w3 (silu(w1 x) * w2 x) (Shazeer, 2020, formula 6), w1 above w2 in one matrix."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(hidden, 2 * inner, bias=False)
        self.w3 = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).tensor_split(2, -1)
        out: Tensor = self.w3(silu(gate) * value)
        return out


class Layer(nn.Module):
    def __init__(self, config: NeoBertConfig) -> None:
        super().__init__()
        hidden = config.hidden
        self.heads, self.base = config.heads, config.rotary_base
        self.qkv, self.wo = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.ffn = SwiGlu(hidden, config.feed_forward)
        self.attention_norm, self.ffn_norm = (Norm(hidden, config.layer_norm_eps) for _ in range(2))

    def turned(self, x: Tensor) -> Tensor:
        """Numbers 2i and 2i + 1 of a head are one complex number, turned by position * base^(-2i / width)."""
        half = x.shape[-1] // 2
        angles = torch.arange(len(x))[:, None] * (1 / self.base ** (torch.arange(half) / half))
        cos, sin = angles.cos()[:, None].to(x), angles.sin()[:, None].to(x)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], -1).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        """Each head has its query, key and value side by side."""
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (self.heads, 3, -1)).unbind(-2)
        scores = torch.einsum("qnd,knd->nqk", self.turned(q), self.turned(k)) / q.shape[-1] ** 0.5
        x = x + self.wo(torch.einsum("nqk,knd->qnd", scores.softmax(-1), v).flatten(1))
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Body(nn.Module):
    """The encoder, its parts by their published names."""

    def __init__(self, config: NeoBertConfig) -> None:
        super().__init__()
        self.encoder = nn.Embedding(config.vocabulary_size, config.hidden)
        self.transformer_encoder = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.layer_norm = Norm(config.hidden, config.layer_norm_eps)


class Written(nn.Module):
    """The paper's model for one row after the other: [length] to states [length, hidden] and logits [length, vocab]."""

    def __init__(self, config: NeoBertConfig) -> None:
        super().__init__()
        self.model = Body(config)
        self.decoder = nn.Linear(config.hidden, config.vocabulary_size)

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
    copy(theirs, ours, hf_format_of(config))
    return ours, theirs


def loss_of(logits: Tensor, batch: Batch) -> Tensor:
    return cross_entropy(logits[batch.target_positions], batch.target_ids, reduction="sum")


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_same_weights_same_outputs_in_fp32(lengths: list[int]) -> None:
    ours, theirs = both(CONFIG, torch.float32, "theirs_to_ours")
    batch = make_batch(lengths, CONFIG.vocabulary_size)
    with torch.no_grad():
        states, logits = theirs(batch)
        assert_close(ours.encoder(batch), states)
        assert_close(ours.logits(batch), logits[batch.target_positions])
        assert_close(ours(batch).terms[0].loss_sum, loss_of(logits, batch))


@st.composite
def shapes(draw: st.DrawFn) -> NeoBertConfig:
    heads, width = draw(st.integers(1, 4)), 2 * draw(st.integers(1, 6))
    return NeoBertConfig(
        layers=draw(st.integers(1, 4)),
        hidden=heads * width,
        heads=heads,
        feed_forward=8 * draw(st.integers(1, 5)),
        vocab=draw(st.integers(20, 60)),
        layer_norm_eps=draw(st.sampled_from([1e-5, 1e-6])),
        rotary_base=draw(st.sampled_from([100.0, 10_000.0])),
    )


@settings(max_examples=12, deadline=None)
@given(
    config=shapes(),
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=5),
    direction=st.sampled_from(["theirs_to_ours", "ours_to_theirs"]),
)
def test_any_shape_and_any_rows_in_fp64(config: NeoBertConfig, lengths: list[int], direction: str) -> None:
    ours, theirs = both(config, torch.float64, direction)
    batch = make_batch(lengths, config.vocabulary_size)
    with torch.no_grad():
        expected = theirs(batch)[1][batch.target_positions]
        assert (ours.logits(batch) - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_same_gradients() -> None:
    ours, theirs = both(CONFIG, torch.float64, "theirs_to_ours")
    batch = make_batch(LENGTHS["mixed"], CONFIG.vocabulary_size)
    ours(batch).terms[0].loss_sum.backward()
    loss_of(theirs(batch)[1], batch).backward()
    table, found = hf_format_of(CONFIG).table, gradients_of(ours)
    wanted = table.unpack(gradients_of(theirs).__getitem__, table.their_names(CONFIG.layers), CONFIG.layers)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-8, atol=1e-8, msg=name)


def test_the_published_size() -> None:
    """198 M in its layers, about 250 M in all (section 3.1)."""
    with on_meta():
        model = masked_language_model(official.NEOBERT_BASE)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == 2 * 30_522 * 768 + 30_522 + 28 * (4 * 768**2 + 3 * 768 * 2048 + 2 * 768) + 768
    assert 240e6 < count < 250e6


@settings(max_examples=20, deadline=None)
@given(config=shapes())
def test_its_config_reads_back(config: NeoBertConfig) -> None:
    assert read_config(hf_format_of(config).fields) == config


def published(config: NeoBertConfig, intermediate: int) -> dict[str, object]:
    """The authors' config.json, as far as it is known here: no field of ours."""
    return {
        "architectures": ["NeoBERTLMHead"],
        "model_type": "neobert",
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": intermediate,
        "embedding_init_range": 0.02,
        "decoder_init_range": 0.02,
        "norm_eps": config.layer_norm_eps,
        "vocab_size": config.vocab,
        "pad_token_id": 0,
        "max_length": config.max_length,
    }


@pytest.mark.parametrize(("intermediate", "inner"), [(3072, 2048), (120, 80), (109, 72), (110, 80), (2, 8)])
def test_the_authors_own_config_is_read(intermediate: int, inner: int) -> None:
    """The width of the blocks is two thirds of theirs, without its fraction, and then up to a multiple of 8."""
    found = read_config(published(CONFIG, intermediate))
    assert found == CONFIG.model_copy(update={"feed_forward": inner})


@settings(max_examples=8, deadline=None)
@given(config=shapes(), seed=st.integers(0, 99))
def test_the_authors_own_folder_is_read(config: NeoBertConfig, seed: int) -> None:
    """By config.json and safetensors alone, and by its headers; a damaged matrix is told."""
    config = config.model_copy(update={"rotary_base": 10_000.0})
    theirs = random_weights(Written(config), seed).eval()
    with TemporaryDirectory() as name:
        folder = Path(name)
        fields = published(config, config.feed_forward * 3 // 2)
        (folder / "config.json").write_text(json.dumps(fields))
        save_file(dict(theirs.state_dict()), folder / "model.safetensors")
        found = load_pretrained(folder)
        assert found.config == config
        check_weights(found.config, open_store(name), "mlm")
        ours = masked_language_model(config).double().eval()
        ours.load_state_dict({name: tensor.double() for name, tensor in found.tensors.items()})
        batch = make_batch([9, 1, 40], config.vocabulary_size)
        with torch.no_grad():
            expected = theirs.double()(batch)[1][batch.target_positions]
            assert (ours.logits(batch) - expected).abs().max() <= 1e-12 * expected.abs().max()
        key = "model.transformer_encoder.0.qkv.weight"
        save_file(theirs.float().state_dict() | {key: torch.zeros(1, config.hidden)}, folder / "model.safetensors")
        for read in (lambda: load_pretrained(folder), lambda: check_weights(config, open_store(name), "mlm")):
            with pytest.raises(ModelError, match=rf"{key} is \(1, "):
                read()


def test_what_their_code_cannot_hold_is_refused() -> None:
    with pytest.raises(ModelError, match=r"feed_forward is 81.*multiples of 8"):
        hf_format_of(CONFIG.model_copy(update={"feed_forward": 81}))
    with pytest.raises(ModelError, match="lacks intermediate_size"):
        read_config({name: value for name, value in published(CONFIG, 120).items() if name[:5] != "inter"})
