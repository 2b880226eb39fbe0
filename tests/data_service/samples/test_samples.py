"""Rows are selected, joined and reordered whole: each keeps what it has on every axis."""

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from data_service.samples.samples import Samples, distribute_rows, join_rows, slice_rows

Row = dict[str, Any]
BY_ROW: dict[str, type[np.generic]] = {
    "segment_starts": np.int32, "restarts": np.bool_, "languages": np.uint16, "pair_label": np.int8,
    "reversed_rows": np.bool_, "text_starts": np.int32, "cls_last": np.bool_, "causal": np.bool_,
    "rates": np.float32, "maskable": np.int32,
}  # fmt: skip
TABLES = {"languages": 2, "text_starts": 3}


def _samples(random: np.random.Generator, rows: int, present: set[str]) -> Samples:
    def ragged(longest: int) -> NDArray[np.int64]:
        return np.append(0, np.cumsum(random.integers(0, longest, rows)))

    offsets, forms = ragged(9), ragged(6)
    count = offsets[-1]
    targets = np.flatnonzero(random.random(count) < 0.3)
    columns: dict[str, Any] = {
        name: random.integers(0, 2, (rows, TABLES[name]) if name in TABLES else rows).astype(dtype)
        for name, dtype in BY_ROW.items()
    }
    columns |= {
        "order": random.integers(0, 9, count).astype(np.int32),
        "holes": np.flatnonzero(random.random(count) < 0.2),
        "corrupted": random.integers(0, 99, forms[-1]).astype(np.uint16),
    }
    chosen = {name: column for name, column in columns.items() if name in present}
    if "corrupted" in present:
        chosen["corrupted_offsets"] = forms
    ids = random.integers(0, 99, (2, count)).astype(np.uint16)
    return Samples(ids[0], offsets, targets, ids[1, : len(targets)], **chosen)


def _rows(samples: Samples) -> list[Row]:
    """What each row has, found row by row."""
    found = []
    for row in range(samples.rows):
        first, stop = samples.offsets[row : row + 2].tolist()
        targets = (samples.target_positions >= first) & (samples.target_positions < stop)
        one: Row = {
            "tokens": samples.tokens[first:stop].tolist(),
            "targets": (samples.target_positions[targets] - first).tolist(),
            "ids": samples.target_ids[targets].tolist(),
        }
        one |= {name: column[row].tolist() for name in BY_ROW if (column := getattr(samples, name)) is not None}
        if samples.order is not None:
            one["order"] = samples.order[first:stop].tolist()
        if samples.holes is not None:
            one["holes"] = [hole - first for hole in samples.holes.tolist() if first <= hole < stop]
        if samples.corrupted is not None and samples.corrupted_offsets is not None:
            start, end = samples.corrupted_offsets[row : row + 2]
            one["form"] = samples.corrupted[start:end].tolist()
        found.append(one)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_any_rows_with_any_columns_stay_whole(seed: int) -> None:
    random = np.random.default_rng(seed)
    names = [*BY_ROW, "order", "holes", "corrupted"]
    present = {name for name in names if random.random() < 0.5}
    parts = [_samples(random, int(random.integers(0, 12)), present) for _ in range(random.integers(1, 5))]
    joined = join_rows(parts)
    rows = _rows(joined)
    assert rows == [row for part in parts for row in _rows(part)]
    first, stop = np.sort(random.integers(0, joined.rows + 1, 2)).tolist()
    assert _rows(slice_rows(joined, first, stop)) == rows[first:stop]
    chosen = [random.integers(0, joined.rows, 5 * bool(joined.rows)) for _ in range(3)]
    for dealt, numbers in zip(distribute_rows(joined, chosen), chosen, strict=True):
        assert _rows(dealt) == [rows[number] for number in numbers]
        for field in fields(Samples):
            before, after = getattr(joined, field.name), getattr(dealt, field.name)
            assert (None if before is None else before.dtype) == (None if after is None else after.dtype)
