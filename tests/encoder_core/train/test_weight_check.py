"""Digests of weights: any flipped bit shows, whatever the type, the place and the length; and who deviates."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from encoder_core.train.weight_check import (
    CorruptReplica,
    ReplicatedWeights,
    bit_sums,
    deviating_ranks,
    join_int64,
    split_int64,
)

INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}


@given(
    dtype=st.sampled_from(list(INTEGERS)),
    offset=st.integers(0, 9),
    length=st.integers(1, 40),
    data=st.data(),
)
def test_any_flipped_bit_shows(dtype: torch.dtype, offset: int, length: int, data: st.DataObject) -> None:
    """Views into a longer tensor, as ZeRO's are, at offsets that are no multiples of eight bytes."""
    buffer = torch.randn(60, generator=torch.Generator().manual_seed(length)).to(dtype)
    view = buffer[offset : offset + length]
    before = bit_sums([view, buffer])
    place = data.draw(st.integers(0, length - 1))
    bit = data.draw(st.integers(0, 8 * dtype.itemsize - 1))
    bits = view.view(INTEGERS[dtype])
    bits[place] ^= torch.tensor(1 << bit).to(INTEGERS[dtype])  # the highest bit wraps to the sign
    assert (bit_sums([view, buffer]) != before).all()
    bits[place] ^= torch.tensor(1 << bit).to(INTEGERS[dtype])
    assert (bit_sums([view, buffer]) == before).all()


def test_a_sum_is_that_of_64_bit_words_modulo_two_to_the_64() -> None:
    values = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    expected = sum(int(word) for word in values.view(np.uint64)) % 2**64
    (found,) = bit_sums([torch.from_numpy(values)]).tolist()
    assert found % 2**64 == expected


def test_nothing_has_a_sum_too() -> None:
    assert bit_sums([torch.empty(0), torch.zeros(3)]).tolist() == [0, 0]
    assert ReplicatedWeights().digest().tolist() == []


def test_tensors_that_change_places_show() -> None:
    first, second = torch.randn(10), torch.randn(10)
    assert ReplicatedWeights((first, second)).digest() != ReplicatedWeights((second, first)).digest()


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5))
def test_halves_carry_64_bits_through_float64(values: list[int]) -> None:
    row = split_int64([torch.tensor(values, dtype=torch.int64)])
    carried = join_int64(torch.tensor(row, dtype=torch.float64).tolist())
    pairs = zip(carried[::2], carried[1::2], strict=True)
    assert [(high << 32) + low for high, low in pairs] == values


@pytest.mark.parametrize(
    ("digests", "ranks"),
    [
        ([(1,), (2,)], ()),
        ([(1,), (2,), (1,)], (1,)),
        ([(2,), (1,), (1,), (1,), (3,)], (0, 4)),
        ([(1, 1), (1, 1), (1, 2)], (2,)),
        ([(1,), (1,), (2,), (2,)], ()),
        ([(1,), (2,), (3,)], ()),
    ],
)
def test_the_majority_is_right(digests: list[tuple[int, ...]], ranks: tuple[int, ...]) -> None:
    assert deviating_ranks(digests) == ranks


def test_the_error_says_who_and_what() -> None:
    assert "of rank 1, 4 " in str(CorruptReplica(7, (1, 4), "encoder.weight"))
    assert "encoder.weight" in str(CorruptReplica(7, (1, 4), "encoder.weight"))
    assert "unknown" in str(CorruptReplica(7, (), None))
