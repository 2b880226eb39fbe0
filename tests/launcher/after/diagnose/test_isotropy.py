"""IsoScore, effective rank, mean cosine and whitening: the properties that their papers state, at random."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ortho_group

from launcher.after.diagnose.isotropy import Whitening, effective_rank, iso_score, mean_cosine

DRAWS = st.integers(0, 2**32 - 1).map(np.random.default_rng)
SOME = settings(max_examples=30, deadline=None)


def with_covariance(variances: np.ndarray, draw: np.random.Generator, points: int = 80) -> np.ndarray:
    """Points whose covariance is exactly diagonal, and their mean 0."""
    cloud = draw.normal(size=(points, len(variances)))
    return Whitening.fit(cloud)(cloud) * np.sqrt(variances)


@SOME
@given(DRAWS, st.integers(2, 12), st.integers(1, 12), st.floats(1e-3, 1e3))
def test_isoscore_is_linear_in_the_directions_that_are_used(
    draw: np.random.Generator, dimensions: int, used: int, variance: float
) -> None:
    """1 with equal variance in all directions, 0 on a line, (k - 1) / (n - 1) in k of n directions (section 4.3)."""
    used = min(used, dimensions)
    variances = np.where(np.arange(dimensions) < used, variance, 0.0)
    score = iso_score(with_covariance(variances[:used], draw) @ np.eye(used, dimensions))
    assert score == pytest.approx((used - 1) / (dimensions - 1), abs=1e-9)


@SOME
@given(DRAWS, st.integers(2, 10), st.floats(1e-3, 1e3))
def test_isoscore_changes_with_neither_place_nor_size_nor_direction(
    draw: np.random.Generator, dimensions: int, scale: float
) -> None:
    cloud = draw.normal(size=(60, dimensions)) * draw.uniform(0.1, 3, dimensions)
    turned = cloud @ ortho_group.rvs(dimensions, random_state=int(draw.integers(1 << 31)))
    assert iso_score(scale * turned + draw.normal(size=dimensions)) == pytest.approx(
        iso_score(cloud), abs=1e-8
    )


@SOME
@given(DRAWS, st.integers(2, 10))
def test_isoscore_is_a_share_and_one_dominating_direction_takes_it_to_zero(
    draw: np.random.Generator, dimensions: int
) -> None:
    """Maximum variance (section 4.2): the larger one variance is, the lower the score."""
    scores = [
        iso_score(with_covariance(np.r_[largest, np.ones(dimensions - 1)], draw))
        for largest in (1, 4, 100, 1e8)
    ]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] == pytest.approx(1)
    assert scores[-1] == pytest.approx(0, abs=1e-3)
    assert 0 <= iso_score(draw.normal(size=(30, dimensions))) <= 1


@SOME
@given(DRAWS, st.lists(st.floats(0, 100), min_size=2, max_size=8).filter(lambda found: max(found) > 1e-3))
def test_isoscore_is_what_the_participation_ratio_says(
    draw: np.random.Generator, variances: list[float]
) -> None:
    """The closed form of the paper's steps: n phi = (sum of variances)^2 / sum of their squares."""
    found = np.array(variances)
    ratio = found.sum() ** 2 / np.square(found).sum()
    expected = (ratio - 1) / (len(found) - 1)
    cloud = draw.normal(size=(80, len(found)))
    cloud = Whitening.fit(cloud)(cloud) * np.sqrt(found)
    assert iso_score(cloud) == pytest.approx(expected, abs=1e-8)


def test_no_score_where_there_is_no_variance() -> None:
    assert np.isnan(iso_score(np.ones((5, 3))))
    assert np.isnan(iso_score(np.ones((1, 3))))
    assert np.isnan(iso_score(np.ones((5, 1))))


@SOME
@given(DRAWS, st.integers(1, 8), st.integers(1, 8))
def test_effective_rank_lies_between_one_and_the_rank(
    draw: np.random.Generator, rank: int, dimensions: int
) -> None:
    """Roy & Vetterli, property 1; equal to the rank if all singular values are equal; free of scale and rotation."""
    rank = min(rank, dimensions)
    cloud = draw.normal(size=(20, rank)) @ draw.normal(size=(rank, dimensions))
    found = effective_rank(cloud)
    assert 1 - 1e-9 <= found <= np.linalg.matrix_rank(cloud) + 1e-9
    assert effective_rank(7 * cloud[:, ::-1]) == pytest.approx(found)
    assert effective_rank(np.linalg.qr(draw.normal(size=(20, rank)))[0]) == pytest.approx(rank)


@SOME
@given(DRAWS, st.integers(2, 20), st.integers(1, 6), st.booleans())
def test_the_mean_cosine_is_that_of_all_pairs(
    draw: np.random.Generator, points: int, dimensions: int, with_null: bool
) -> None:
    cloud = draw.normal(size=(points, dimensions)) + 0.5
    cloud[0] *= 0 if with_null else 1
    lengths = np.maximum(np.linalg.norm(cloud, axis=1), 1e-300)
    pairs = [
        cloud[i] @ cloud[j] / (lengths[i] * lengths[j])
        for i in range(points)
        for j in range(points)
        if i != j
    ]
    assert mean_cosine(cloud) == pytest.approx(np.mean(pairs), abs=1e-9)


@SOME
@given(DRAWS, st.integers(2, 8))
def test_normalising_does_not_cure_a_cone_and_whitening_does(
    draw: np.random.Generator, dimensions: int
) -> None:
    cone = draw.normal(size=(200, dimensions)) + 20 * np.ones(dimensions)
    normalised = cone / np.linalg.norm(cone, axis=1, keepdims=True)
    assert mean_cosine(normalised) == pytest.approx(mean_cosine(cone))
    assert mean_cosine(cone) > 0.98
    assert abs(mean_cosine(Whitening.fit(cone[::2])(cone[1::2]))) < 0.2  # of 100 vectors, by halves


@SOME
@given(DRAWS, st.integers(1, 6), st.integers(1, 6))
def test_whitened_vectors_have_mean_zero_and_covariance_one(
    draw: np.random.Generator, rank: int, dimensions: int
) -> None:
    rank = min(rank, dimensions)
    cloud = draw.normal(size=(50, rank)) @ draw.normal(size=(rank, dimensions)) + draw.normal(size=dimensions)
    white = Whitening.fit(cloud)(cloud)
    assert white.shape[1] == np.linalg.matrix_rank(cloud - cloud.mean(0))
    assert np.allclose(white.mean(0), 0, atol=1e-6)
    assert np.allclose(np.cov(white.T), np.eye(white.shape[1]), atol=1e-6)
