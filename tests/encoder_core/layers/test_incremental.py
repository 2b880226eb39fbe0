"""A decoder that writes token by token against the same decoder over whole rows: states, logits and chosen ids."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder_core.batch import Batch, untargeted
from encoder_core.families.bart import BartConfig
from encoder_core.layers.decoder import following
from encoder_core.layers.incremental import IncrementalDecoder
from encoder_core.objectives.denoise import DenoisingModel, denoising_model
from tests.support.models.parity import assert_close, make_batch, random_weights

END = 2
LONGEST = 16
lengths = st.integers(1, LONGEST)


def model(layers: int, heads: int, width: int, vocab: int, seed: int) -> DenoisingModel:
    config = BartConfig(
        layers=layers, hidden=heads * width, heads=heads, feed_forward=9, vocab=vocab, max_length=LONGEST
    )
    return random_weights(denoising_model(config), seed).double().eval()


def rectangle(rows: int, length: int, vocab: int) -> Batch:
    """Rows of one length, as writing side by side makes them."""
    return make_batch([length] * rows, vocab, seed=rows * length)


@pytest.mark.long
@settings(max_examples=12)
@given(
    layers=st.integers(1, 3),
    heads=st.integers(1, 3),
    width=st.integers(1, 6),
    length=lengths,
    read=st.lists(lengths, min_size=1, max_size=4),
    seed=st.integers(0, 99),
)
@torch.no_grad()
def test_every_token_has_the_logits_of_the_whole_row(
    layers: int, heads: int, width: int, length: int, read: list[int], seed: int
) -> None:
    """In fp64 within 1e-10, for rows that read texts of other lengths."""
    ours, batch = model(layers, heads, width, 31, seed), rectangle(len(read), length, 31)
    form = make_batch(read, 31, seed=seed)
    whole_TH = ours.states(replace(batch, corrupted=form))
    inputs_RW = following(batch).tokens.view(len(read), length)
    decoder = IncrementalDecoder(ours.decoder, ours.encoder(form), form)
    states_RWH = torch.stack([decoder.step(ids_R) for ids_R in inputs_RW.unbind(1)], 1)
    assert_close(states_RWH.flatten(0, 1), whole_TH)
    assert_close(ours.head.logits(states_RWH.flatten(0, 1)), ours.head.logits(whole_TH))


@pytest.mark.long
@settings(max_examples=4)
@given(read=st.lists(lengths, min_size=1, max_size=4), seed=st.integers(0, 99))
@torch.no_grad()
def test_the_same_ids_are_written(read: list[int], seed: int) -> None:
    """The likeliest each time, to the longest row: all rows by steps, and each by itself, all before it anew."""
    ours, form = model(2, 2, 4, 53, seed), make_batch(read, 53, seed=seed)
    decoder = IncrementalDecoder(ours.decoder, ours.encoder(form), form)
    written = [torch.full((len(read),), END)]
    while len(written) < LONGEST:
        written.append(ours.head.logits(decoder.step(written[-1])).argmax(-1))
    found = torch.stack(written, 1)[:, 1:].tolist()
    for ids, tokens in zip(form.tokens.split(read), found, strict=True):
        assert tokens == anew(ours, untargeted(ids, [len(ids)]), len(tokens))


def anew(ours: DenoisingModel, read: Batch, count: int) -> list[int]:
    states_SH, written = ours.encoder(read), list[int]()
    while len(written) < count:
        row = untargeted(torch.tensor([*written, END]), [len(written) + 1])
        written.append(int(ours.head.logits(ours.decoder(row, states_SH, read)[-1:]).argmax()))
    return written
