"""Feistel permutations: bijections of any size, random, and computed point by point."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data_service.stream.order import Permutation


@given(st.integers(1, 3000), st.integers(0, 1 << 40))
@example(65535, 0)
@example(65536, 0)
@example(65537, 0)
def test_every_thing_has_one_position(size: int, name: int) -> None:
    things = Permutation.from_name(size, name).items_at(np.arange(size))
    assert np.array_equal(np.sort(things), np.arange(size))


def test_a_point_alone_is_the_point_of_the_whole() -> None:
    permutation = Permutation.from_name(1000, "points")
    whole = permutation.items_at(np.arange(1000))
    assert [permutation.item_at(position) for position in range(0, 1000, 37)] == whole[::37].tolist()


def test_a_trillion_things_are_ordered_without_listing_them() -> None:
    permutation = Permutation.from_name(10**12, "large")
    things = permutation.items_at(np.arange(10**6, 10**6 + 1000))
    assert len(set(things.tolist())) == 1000
    assert (things >= 0).all()
    assert (things < 10**12).all()


@pytest.mark.parametrize("position", [-1, 10])
def test_positions_outside_are_refused(position: int) -> None:
    with pytest.raises(IndexError, match=r"\bpermutation\b.*\b10$"):
        Permutation.from_name(10, "x").item_at(position)


@pytest.mark.long
@pytest.mark.heavy
@pytest.mark.parametrize("size", [2, 3, 4])
def test_small_orders_are_equally_likely(size: int) -> None:
    draws = 12_000
    seen = Counter(tuple(Permutation.from_name(size, seed).items_at(np.arange(size)).tolist()) for seed in range(draws))
    orders = list(itertools.permutations(range(size)))
    expected = draws / len(orders)
    chi_square = sum((seen[order] - expected) ** 2 / expected for order in orders)
    assert chi_square < len(orders) - 1 + 5 * np.sqrt(2 * len(orders))


def test_neighbours_are_scattered() -> None:
    """Distances between things at consecutive positions are those of independent uniform draws."""
    size = 100_000
    things = Permutation.from_name(size, "scatter").items_at(np.arange(size))
    distances = np.abs(np.diff(things)) / size
    assert abs(distances.mean() - 1 / 3) < 5 * np.sqrt(1 / 18 / size)
    assert abs(np.corrcoef(things[:-1], things[1:])[0, 1]) < 5 / np.sqrt(size)
    rank_correlation = np.corrcoef(things, np.arange(size))[0, 1]
    assert abs(rank_correlation) < 5 / np.sqrt(size)


def test_other_names_give_unrelated_orders() -> None:
    first, second = (Permutation.from_name(5000, "epoch", epoch).items_at(np.arange(5000)) for epoch in (0, 1))
    assert (first == second).sum() < 10
