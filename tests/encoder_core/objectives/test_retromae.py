"""RetroMAE against a plain statement of its decoder, row by row and query by query, and apart as together."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from encoder_core.batch import Batch, idle_batch, select_rows
from encoder_core.errors import ModelError
from encoder_core.families.catalogue import ModelConfig
from encoder_core.families.roberta import RobertaConfig
from encoder_core.heads.shallow_decoder import visible_tokens
from encoder_core.objectives.compose import compose
from encoder_core.objectives.mlm import MlmConfig
from encoder_core.objectives.modules.multitask import MultitaskModel
from encoder_core.objectives.replaced import ReplacedTokenConfig
from encoder_core.objectives.retromae import RetromaeConfig
from encoder_core.objectives.term import TermConfig
from tests.support.models.parity import make_batch
from tests.support.models.terms import SIZE, assert_reaches_every_parameter, assert_same_gradients, families, trained_by

MODELS = families()
RATE = 0.6


def built(model: ModelConfig) -> MultitaskModel:
    return trained_by(model, MlmConfig(), RetromaeConfig(rate=RATE))


def literal(network: MultitaskModel, model: ModelConfig, batch: Batch) -> tuple[Tensor, int]:
    """Sum of losses and number of right predictions, in fp64: every query by itself, over the keys that it sees."""
    decoder: Any = network.shallow_decoder
    states_TH = network.states(batch).all_states
    text = batch.tokens.tolist()
    for at, token in zip(batch.target_positions.tolist(), batch.target_ids.tolist(), strict=True):
        text[at] = token
    torch.manual_seed(7)
    seen = visible_tokens(batch, RATE)
    loss, correct = torch.zeros((), dtype=torch.float64), 0
    for start, stop in pairwise(batch.cu_seqlens.tolist()):
        vector = states_TH[start]
        words = [_word(network, decoder, token) for token in text[start:stop]]
        places = decoder.position.weight
        keys = [vector] + [_norm(decoder.norm, words[i] + places[i]) for i in range(1, stop - start)]
        for i in range(1, stop - start):
            query = vector + places[i]  # formula 5 of the paper: no LayerNorm, as in the authors' code
            others = [keys[j] for j in range(stop - start) if j == 0 or (j != i and seen[start + i, j])]
            attended = query + _attention(decoder, query, torch.stack(others), model.heads)
            normed = _norm(decoder.attention_norm, attended)
            inner = F.linear(normed, decoder.feed_forward.up.weight, decoder.feed_forward.up.bias)
            inner = F.silu(inner) if model.activation == "silu" else F.gelu(inner)
            inner = F.linear(inner, decoder.feed_forward.down.weight, decoder.feed_forward.down.bias)
            logits = network.head.logits(_norm(decoder.feed_forward_norm, normed + inner)[None])[0]
            loss = loss - logits.log_softmax(0)[text[start + i]]
            correct += int(logits.argmax() == text[start + i])
    return loss, correct


def _word(network: MultitaskModel, decoder: Any, token: int) -> Tensor:
    word: Tensor = network.encoder.embeddings.word.weight[token]
    if decoder.projection is None:
        return word
    return F.linear(word, decoder.projection.weight, decoder.projection.bias)


def _norm(norm: torch.nn.LayerNorm, x: Tensor) -> Tensor:
    scale = (x.var(unbiased=False) + norm.eps).rsqrt()
    return (x - x.mean()) * scale * norm.weight + norm.bias


def _attention(decoder: Any, query_H: Tensor, keys_KH: Tensor, heads: int) -> Tensor:
    q = F.linear(query_H, decoder.query.weight, decoder.query.bias).chunk(heads)
    k = F.linear(keys_KH, decoder.key.weight, decoder.key.bias).chunk(heads, 1)
    v = F.linear(keys_KH, decoder.value.weight, decoder.value.bias).chunk(heads, 1)
    contexts = [((k[n] @ q[n]) / len(q[n]) ** 0.5).softmax(0) @ v[n] for n in range(heads)]
    return F.linear(torch.cat(contexts), decoder.output.weight, decoder.output.bias)


@pytest.mark.parametrize("name", MODELS)
def test_sums_and_gradients_are_the_literal_formula(name: str) -> None:
    network, batch = built(MODELS[name]), make_batch([9, 14, 1, 2], 50)
    expected, correct = literal(network, MODELS[name], batch)
    torch.manual_seed(7)
    outcome = network(batch)
    term = outcome.terms[1]
    assert (term.name, term.targets) == ("retromae", 8 + 13 + 0 + 1)
    assert network.target_counts(batch)["retromae"] == term.targets
    torch.testing.assert_close(term.loss_sum, expected, rtol=1e-10, atol=0)
    assert outcome.metrics["retromae_correct"] == correct
    assert_same_gradients(network, term.loss_sum, expected)
    in_fp32 = network.float()
    torch.manual_seed(7)
    torch.testing.assert_close(in_fp32(batch).terms[1].loss_sum.double(), expected, rtol=1e-5, atol=0)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=5), st.floats(0.05, 0.95), st.integers(0, 99))
def test_a_query_sees_the_vector_and_others_of_its_row_but_never_itself(
    lengths: list[int], rate: float, seed: int
) -> None:
    batch = make_batch(lengths, 50)
    torch.manual_seed(seed)
    seen = visible_tokens(batch, rate)
    assert seen[:, 0].all()
    places = batch.positions
    assert not seen[torch.arange(len(places)), places][places > 0].any()
    last = batch.cu_seqlens.diff().repeat_interleave(batch.cu_seqlens.diff())
    assert not seen[torch.arange(max(lengths)) >= last[:, None]].any()


def test_as_many_are_hidden_as_the_rate_says() -> None:
    """Of 40 rows of 40 tokens: 59,280 draws, whose share has a standard deviation of 0.002."""
    batch = make_batch([40] * 40, 50)
    torch.manual_seed(1)
    seen = visible_tokens(batch, RATE)
    place = torch.arange(40)
    drawn = (batch.positions[:, None] > 0) & (place > 0) & (place != batch.positions[:, None])
    assert (~seen[drawn]).double().mean().item() == pytest.approx(RATE, abs=0.01)
    by_query = (~seen & drawn).sum(1)[batch.positions > 0].double()
    assert by_query.var().item() == pytest.approx(38 * RATE * (1 - RATE), rel=0.15)  # each by itself


def test_rows_are_drawn_by_their_numbers() -> None:
    """Whatever else is in the batch, and however long that is."""
    network, together = built(MODELS["bert"]), make_batch([5, 24, 7, 12], 50)
    apart: list[Tensor] = []
    for rows in ([0, 2], [1, 3]):
        torch.manual_seed(3)
        apart.append(network(select_rows(together, torch.tensor(rows))).terms[1].loss_sum)
    torch.manual_seed(3)
    whole = network(together).terms[1].loss_sum
    torch.testing.assert_close(apart[0] + apart[1], whole, rtol=1e-12, atol=0)
    torch.manual_seed(4)
    assert network(together).terms[1].loss_sum != whole


def test_the_text_is_read_as_it_was_before_masks_and_the_vector_as_after() -> None:
    network, batch = built(MODELS["bert"]), make_batch([20, 9], 50)
    others = replace(batch, tokens=batch.tokens.index_fill(0, batch.target_positions, 3))
    one, other = network(batch).terms[1], network(others).terms[1]
    assert one.targets == other.targets
    assert one.loss_sum != other.loss_sum  # the vectors differ
    with torch.no_grad():
        last: Any = network.encoder.layers[-1]
        last.feed_forward_norm.weight.zero_()  # now they are alike
    losses = []
    for given_batch in (batch, others):
        torch.manual_seed(5)
        losses.append(network(given_batch).terms[1].loss_sum)
    assert torch.equal(*losses)


@pytest.mark.parametrize("name", ["bert", "albert", "deberta"])
def test_an_idle_batch_and_rows_of_one_token_reach_every_parameter(name: str) -> None:
    network = built(MODELS[name]).train()
    alone = make_batch([1, 1], 50)
    for batch in (alone, idle_batch(torch.device("cpu"))):
        assert network.target_counts(batch)["retromae"] == 0
        assert_reaches_every_parameter(network, batch)


@pytest.mark.parametrize(
    "terms",
    [
        {"retromae": RetromaeConfig()},
        {"mlm": MlmConfig(), "retromae": RetromaeConfig(), "rtd": ReplacedTokenConfig()},
    ],
    ids=["alone", "a generator"],
)
def test_it_needs_masks_and_the_network_that_is_used(terms: dict[str, TermConfig]) -> None:
    with pytest.raises(ModelError, match=r"\bretromae\b"):
        compose(RobertaConfig(**SIZE), terms)
