"""Numbers that belong to places: equally likely, independent, and the same whatever they are computed among."""

import itertools

import pytest
import torch

from encoder_core.random_draws import draw_key, head_keys, table_keys, token_keys, uniform_int16, uniforms


def keys_of(rows: int, length: int, first: int = 0) -> torch.Tensor:
    return token_keys(torch.arange(first, first + rows), torch.full((rows,), length), torch.arange(length).repeat(rows))


@pytest.mark.parametrize("seed", range(4))
def test_all_numbers_are_equally_likely(seed: int) -> None:
    """And so are pairs of neighbours in every direction: column, place, head, row, draw."""
    torch.manual_seed(seed)
    keys = head_keys(keys_of(8, 32), range(4))
    table = torch.stack([uniform_int16(keys, draw_key(), range(64)).view(8, 32, 4, 64) for _ in range(4)])
    assert table.double().mean().abs() < 4 * 2**16 / 12**0.5 / table.numel() ** 0.5
    cells = (table.int() + 2**15) >> 12  # 16 kinds
    for axis in range(table.dim()):
        one, other = (cells.narrow(axis, start, cells.shape[axis] - 1).flatten() for start in (0, 1))
        observed = torch.bincount(one * 16 + other, minlength=256).double()
        expected = len(one) / 256
        chi_square = float(((observed - expected) ** 2 / expected).sum())
        assert 150 < chi_square < 370  # 255 degrees of freedom: outside once in 100,000


def test_no_two_places_share_their_numbers() -> None:
    """Of a large batch with heads, and of a table: sums of a few constants must not meet."""
    keys = torch.cat([head_keys(keys_of(64, 128), range(16)).flatten(), table_keys(-300, 300, torch.device("cpu"))])
    draw = torch.tensor(12345)
    first = uniform_int16(keys, draw, range(4)).contiguous().view(torch.int64).flatten()
    second = uniform_int16(keys, draw, range(4, 8)).contiguous().view(torch.int64).flatten()
    both = torch.cat([first, second])
    assert len(both.unique()) == len(both)


def test_a_place_has_the_same_numbers_alone_and_among_others() -> None:
    keys, draw = keys_of(5, 7), torch.tensor(-77)
    whole = uniform_int16(keys, draw, range(50))
    for place, (low, high) in itertools.product(range(35), [(0, 50), (3, 17), (4, 8), (49, 50), (13, 13)]):
        assert torch.equal(uniform_int16(keys[place], draw, range(low, high)), whole[place, low:high])
    assert torch.equal(keys_of(2, 7, first=3), keys.view(5, 7)[3:].flatten())
    assert torch.equal(uniforms(keys[4:9], draw, 3), uniforms(keys, draw, 3)[4:9])


def test_uniforms_are_uniform_and_below_one() -> None:
    torch.manual_seed(0)
    x = uniforms(keys_of(100, 100), draw_key(), 5).flatten()
    assert float(x.min()) >= 0
    assert float(x.max()) < 1
    observed = torch.histc(x, 100, 0, 1)
    assert 50 < float(((observed - 500) ** 2 / 500).sum()) < 170  # 99 degrees of freedom
