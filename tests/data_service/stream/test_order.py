"""Orders are bijections of any size, computed point by point; Feistel permutations are random."""

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from data_service.stream.order import LaneOrder, Permutation, RowOrder, SourceOrder, SpreadOrder


@st.composite
def orders(draw: st.DrawFn) -> RowOrder:
    """Any order of any size."""
    count, name = draw(st.integers(1, 300)), ("test", draw(st.integers(0, 1 << 40)))
    match draw(st.sampled_from(["random", "spread", "lanes", "sources"])):
        case "spread":
            return SpreadOrder(count, draw(st.integers(1, 40)), name)
        case "lanes":
            directions = draw(st.sampled_from([1, 2]))
            lanes = directions * draw(st.integers(1, 6))
            return LaneOrder(lanes * count, lanes, directions)
        case "sources":
            batch = draw(st.integers(1, 7))
            sizes = tuple(batch * n for n in draw(st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(any)))
            return SourceOrder(sum(sizes), sizes, batch, draw(st.sampled_from([1, 16])), name)
        case _:
            return Permutation.from_name(count, *name)


@given(orders(), st.data())
@example(Permutation.from_name(65535, 0), None)
@example(Permutation.from_name(65536, 0), None)
@example(Permutation.from_name(65537, 0), None)
def test_every_thing_has_one_position_and_any_part_is_found_alone(order: RowOrder, data: st.DataObject | None) -> None:
    things = order.items_at(np.arange(order.size))
    assert np.array_equal(np.sort(things), np.arange(order.size))
    chosen = data.draw(st.lists(st.integers(0, order.size - 1), max_size=20)) if data else [order.size - 1]
    assert order.items_at(np.array(chosen, dtype=np.int64)).tolist() == things[chosen].tolist()
    assert [order.item_at(position) for position in chosen] == things[chosen].tolist()
    for position in (-1, order.size):
        with pytest.raises(IndexError, match=rf"\b{order.size}$"):
            order.item_at(position)


def test_a_trillion_things_are_ordered_without_listing_them() -> None:
    permutation = Permutation.from_name(10**12, "large")
    things = permutation.items_at(np.arange(10**6, 10**6 + 1000))
    assert len(set(things.tolist())) == 1000
    assert (things >= 0).all()
    assert (things < 10**12).all()


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
