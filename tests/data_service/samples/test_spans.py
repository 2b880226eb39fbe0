"""Lengths of n-grams and spans: a million draws against the published distributions."""

import numpy as np
import pytest

from data_service.rng import draws32, stream_key
from data_service.samples.spans import Lengths, ngram_lengths, span_lengths

DRAWS = 1_000_000


def assert_shares(lengths: Lengths, shares: list[float]) -> np.ndarray:
    """Every length within five standard deviations of its share."""
    drawn = lengths.of(draws32(stream_key("lengths"), 0, DRAWS))
    counts = np.bincount(drawn, minlength=len(shares) + 1)
    assert counts[0] == 0
    assert len(counts) == len(shares) + 1
    for found, share in zip(counts[1:], shares, strict=True):
        assert abs(found - DRAWS * share) <= 5 * np.sqrt(DRAWS * share * (1 - share))
    return drawn


def test_an_ngram_of_n_words_has_probability_proportional_to_one_over_n() -> None:
    assert_shares(ngram_lengths(3), [6 / 11, 3 / 11, 2 / 11])
    assert_shares(ngram_lengths(5), [60 / 137, 30 / 137, 20 / 137, 15 / 137, 12 / 137])


def test_spans_are_geometric_cut_off_at_ten_and_renormalised() -> None:
    drawn = assert_shares(span_lengths(0.2, 10), [0.2 * 0.8**k / (1 - 0.8**10) for k in range(10)])
    assert round(float(drawn.mean()), 1) == 3.8  # Joshi et al. 2020, section 3.1


@pytest.mark.parametrize("lengths", [ngram_lengths(1), span_lengths(0.5, 1)])
def test_a_longest_of_one_word_is_always_one_word(lengths: Lengths) -> None:
    assert_shares(lengths, [1.0])


def test_the_extreme_draws_are_the_shortest_and_the_longest() -> None:
    extremes = np.array([0, (1 << 32) - 1], dtype=np.uint32)
    for lengths in (ngram_lengths(3), span_lengths(0.2, 10)):
        assert lengths.of(extremes).tolist() == [1, lengths.longest]
