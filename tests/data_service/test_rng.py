"""Keyed streams: any range alone, nothing shared between keys, uniform."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_service.rng import draw_uint32, draw_uint64, scale_draws, stream_key


@given(st.integers(0, 5000), st.integers(0, 200))
def test_any_range_is_that_part_of_the_stream(start: int, count: int) -> None:
    key = stream_key("a", 1)
    np.testing.assert_array_equal(
        draw_uint64(key, start, start + count), draw_uint64(key, 0, 5200)[start : start + count]
    )
    np.testing.assert_array_equal(
        draw_uint32(key, start, start + count), draw_uint32(key, 0, 5200)[start : start + count]
    )


def test_far_positions_cost_nothing_and_stay_distinct() -> None:
    key = stream_key("far")
    assert len({int(draw_uint64(key, 1 << power, (1 << power) + 1)[0]) for power in range(70)}) == 70


def test_the_stream_is_philox_and_never_changes() -> None:
    """The first is the published known answer of Philox4x64-10 for counter 0 and key 0."""
    known = np.random.Philox(key=0, counter=(1 << 256) - 1).random_raw(2)  # NumPy counts before it draws
    assert known.tolist() == [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC]
    assert draw_uint64(stream_key("golden", 1), 0, 2).tolist() == [17259383030723900206, 14446662058653722967]


def test_keys_tell_types_and_boundaries_apart() -> None:
    names = [(1, 2), (12,), ("1", 2), (1, "2"), ("12",), ("1", "2"), (1, 2, ""), ()]
    assert len({stream_key(*name) for name in names}) == len(names)


def test_neighbouring_keys_share_no_structure() -> None:
    """The streams of 400 neighbouring (seed, epoch, block) keys are uncorrelated and have no common words."""
    keys = [stream_key(seed, epoch, block) for seed in range(4) for epoch in range(10) for block in range(10)]
    words = np.stack([draw_uint64(key, 0, 256) for key in keys])
    assert len(np.unique(words)) == words.size
    correlation = np.asarray(np.corrcoef(words.astype(np.float64)))
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 5.5 / np.sqrt(256)


def test_bits_are_balanced() -> None:
    words = draw_uint64(stream_key("bits"), 0, 1 << 16)
    ones = [int(((words >> np.uint64(bit)) & np.uint64(1)).sum()) for bit in range(64)]
    assert max(abs(count - (1 << 15)) for count in ones) < 5 * np.sqrt(1 << 14)


def test_scaled_draws_are_uniform_below_their_bounds() -> None:
    draws = draw_uint32(stream_key("scale"), 0, 700_000)
    counts = np.bincount(scale_draws(draws, 7), minlength=7)
    assert ((counts - 1e5) ** 2 / 1e5).sum() < 27.9  # chi-square, 6 degrees, p = 1e-4
    mixed = scale_draws(draws[:6], np.array([1, 1, 2, 2, 1000, 1 << 31]))
    assert (mixed < [1, 1, 2, 2, 1000, 1 << 31]).all()
    assert scale_draws(np.array([0, (1 << 32) - 1], dtype=np.uint32), 10).tolist() == [0, 9]
