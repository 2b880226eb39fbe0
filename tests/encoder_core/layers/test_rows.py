"""Flat rows to a rectangle and back."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.models.parity import rows_of


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_pad_and_back(lengths: list[int]) -> None:
    rows = rows_of(lengths)
    flat = torch.arange(1, 2 * sum(lengths) + 1).view(-1, 2)
    padded = rows.pad(flat)
    assert padded.shape == (len(lengths), max(lengths), 2)
    assert torch.equal(rows.unpad(padded), flat)
    assert rows.is_full == (len(set(lengths)) == 1)
    for (start, stop), row, length in zip(rows.bounds, padded, lengths, strict=True):
        assert torch.equal(row[:length], flat[start:stop])
        assert not row[length:].any()
    if not rows.is_full:
        assert rows.mask is not None
        assert torch.equal(rows.mask[:, 0, 0], padded[..., 0] > 0)
    else:
        assert rows.mask is None
