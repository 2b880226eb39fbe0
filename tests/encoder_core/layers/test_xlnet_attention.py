"""XLNet's kernel for CPUs against the written formula: both streams, memory, segments, rows that run backwards."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from encoder_core.batch import Batch
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers import cpu_attention, cpu_relative
from encoder_core.layers.kernel_choice import Kernel, force_kernel
from encoder_core.layers.xlnet_encoder import Memory, TwoStreamEncoder
from tests.support.models.parity import make_batch, random_weights

VOCABULARY, HIDDEN, LAYERS = 40, 12, 2


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """Rows of one token and more, of a factorisation order or none; rows without targets among them."""
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=4))
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    batch = make_batch(lengths, VOCABULARY, share=draw(st.sampled_from([0.0, 0.3, 1.0])), seed=seed)
    order = torch.cat([torch.randperm(length, generator=generator) for length in lengths])
    count = sum(lengths)
    if draw(st.booleans()):
        batch = replace(batch, segments=torch.randint(draw(st.integers(1, 3)), (count,), generator=generator))
    if draw(st.booleans()):
        batch = replace(batch, reversed_rows=torch.rand(len(lengths), generator=generator) < 0.5)
    return replace(batch, order=order) if draw(st.booleans()) else replace(batch, order=None)


def encoder(dropout: float) -> TwoStreamEncoder:
    config = XlnetConfig(
        layers=LAYERS,
        hidden=HIDDEN,
        heads=3,
        feed_forward=16,
        max_length=16,
        vocab=VOCABULARY,
        memory=0,  # what is carried is given by hand
        dropout=dropout,
        attention_dropout=dropout,
    )
    return random_weights(config.encoder()).double()


def outcome(kernel: Kernel, network: TwoStreamEncoder, batch: Batch, carried: int) -> list[Tensor]:
    """States of both streams, and every parameter's gradient of a weighted sum of them."""
    generator = torch.Generator().manual_seed(5)
    memory: Memory = tuple(
        torch.randn(batch.rows, carried, HIDDEN, generator=generator, dtype=torch.float64)
        for _ in range(LAYERS if carried else 0)
    )
    torch.manual_seed(7)
    with force_kernel(kernel):
        streams = network.streams(batch, memory)
        states = [streams.content] if streams.query is None else [streams.content, streams.query]
        weighted = [(x * torch.linspace(-1, 2, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in states]
        torch.stack(weighted).sum().backward()
    gradients = [x.grad for x in network.parameters() if x.grad is not None]
    network.zero_grad()
    return [*states, *gradients]


@given(
    batch=batches(),
    carried=st.sampled_from([0, 0, 1, 5]),
    dropout=st.sampled_from([0.0, 0.3]),
    cut=st.sampled_from([(1, 1), (40, 3), (2**18, 5), (2**18, 128)]),
)
@settings(max_examples=12)
def test_blocked_equals_the_written_formula_however_it_is_cut(
    batch: Batch, carried: int, dropout: float, cut: tuple[int, int]
) -> None:
    network = encoder(dropout)
    expected = outcome("written", network, batch, carried)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_attention, "PIECE_SCORES", cut[0])
        patch.setattr(cpu_relative, "BLOCK_TOKENS", cut[1])
        actual = outcome("blocked", network, batch, carried)
    for found, wanted in zip(actual, expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
