"""Masks of masked diffusion: a rate for each row, uniform; each token hidden with it, by itself; nothing special."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.rng import Key, stream_key
from data_service.samples.diffusion import MIN_MASK_RATE, DiffusionMasking
from data_service.samples.samples import Samples, join_rows
from data_service.types import Block
from tests.support.data.corpora import NEVER_MASKED, SPECIAL, originals, random_block, targets_per_row
from tests.support.data.row_settings import packed_rows


def make(block: Block, key: Key) -> Samples:
    return packed_rows(block, DiffusionMasking(), key=key)[1]


def rates(samples: Samples) -> np.ndarray:
    assert samples.rates is not None
    return samples.rates


def maskable(samples: Samples) -> np.ndarray:
    assert samples.maskable is not None
    return samples.maskable


@given(st.integers(0, 1000), st.integers(1, 900))
def test_hidden_tokens_are_masks(seed: int, tokens: int) -> None:
    samples = make(random_block(seed=seed, tokens=tokens), stream_key("text", seed))
    special = np.isin(originals(samples), NEVER_MASKED)
    assert (samples.tokens[samples.target_positions] == SPECIAL.mask).all()
    np.testing.assert_array_equal(np.add.reduceat(~special, samples.offsets[:-1]), maskable(samples))
    assert ((rates(samples) >= MIN_MASK_RATE) & (rates(samples) <= 1)).all()


@pytest.fixture(scope="module")
def many() -> Samples:
    """Some 20,000 rows."""
    return join_rows([make(random_block(seed=seed, tokens=60_000), stream_key("many", seed)) for seed in range(20)])


def test_rates_are_uniform(many: Samples) -> None:
    """The empirical distribution is nowhere further from the uniform one than one in a thousand samples would be."""
    drawn = np.sort(rates(many).astype(np.float64))
    count = len(drawn)
    assert count > 15_000
    expected = (drawn - MIN_MASK_RATE) / (1 - MIN_MASK_RATE)
    steps = np.arange(count + 1) / count
    distance = max(np.abs(steps[1:] - expected).max(), np.abs(steps[:-1] - expected).max())
    assert distance < 1.95 / np.sqrt(count)  # Kolmogorov's, at 0.001
    assert abs(np.corrcoef(rates(many)[1:], rates(many)[:-1])[0, 1]) < 4 / np.sqrt(count)


def test_tokens_are_hidden_with_the_rate_of_their_row_and_independently(many: Samples) -> None:
    """The number hidden in a row is binomial: its standard scores have mean 0 and variance 1; places do not matter."""
    p, n = rates(many).astype(np.float64), maskable(many).astype(np.float64)
    scores = (targets_per_row(many) - n * p) / np.sqrt(n * p * (1 - p))
    ordinary = (p > 0.05) & (p < 0.95) & (n > 20)
    scores = scores[ordinary]
    count = len(scores)
    assert abs(scores.mean()) < 4 / np.sqrt(count)
    assert abs(scores.var() - 1) < 4 * np.sqrt(2 / count) + 0.01
    hidden = np.zeros(len(many.tokens), dtype=np.bool_)
    hidden[many.target_positions] = True
    first = hidden[many.offsets[:-1] + 1]
    assert abs((first - p).mean()) < 4 * np.sqrt((p * (1 - p)).mean() / len(p))


def test_other_readings_have_other_rates_and_masks() -> None:
    block = random_block(seed=1, tokens=900)
    one, other = (make(block, stream_key("epoch", epoch)) for epoch in (0, 1))
    assert (rates(one) != rates(other)).all()
    assert one.target_positions.tolist() != other.target_positions.tolist()
    assert [DiffusionMasking().epoch_of_draws(epoch) for epoch in range(3)] == [0, 1, 2]


def test_about_half_of_the_tokens_are_expected(many: Samples) -> None:
    expected = sum(DiffusionMasking().expected_target_count(0, count) for count in maskable(many).tolist())
    assert len(many.target_ids) == pytest.approx(expected, rel=0.02)
