"""The shuffle's radius: what a batch draws on, at real size, and the order that keeps neighbours apart."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.corpus.manifest import make_block_table
from data_service.errors import PlanError
from data_service.ingest.options import BLOCK_TOKENS
from data_service.stream.order import SpreadOrder
from data_service.stream.statistics import NEAR_ROWS, ShuffleRadius, expected_radius, shuffle_radius
from tests.support.data.corpora import plan_of

LARGE = [1e9, 4.8e9, 2.4e9, 1.9e9]  # roberta-large-160gb's sources, a quarter as large
FORMER_BLOCK = 1 << 20


@settings(deadline=None, max_examples=50)
@given(st.integers(17, 5000), st.integers(0, 9))
def test_what_follows_is_never_in_the_same_stretch_or_the_next(size: int, seed: int) -> None:
    """Of 16: a batch as long as a stretch may lie across two."""
    things = SpreadOrder(size, 16, ("test", seed)).items_at(np.arange(size))
    begins = np.append(True, np.diff(things % 16) != 0)
    assert begins.sum() == 16
    stretch = np.empty(size, dtype=np.int64)
    stretch[things] = np.cumsum(begins)
    for apart in range(1, 7):
        assert np.abs(stretch[apart:] - stretch[:-apart]).min() >= 2


def test_orders_differ_by_name_and_are_not_regular() -> None:
    first, second = (SpreadOrder(16_000, 16, ("test", n)).items_at(np.arange(16_000)) for n in (0, 1))
    assert (first == second).mean() < 0.01
    assert Counter(np.diff(first[:1000]).tolist()).most_common(1)[0][1] < 20


def at_large_batches(*, spread: bool, block_tokens: int) -> ShuffleRadius:
    return expected_radius(LARGE, batch=8192, length=512, is_spread=spread, block_tokens=block_tokens)


@pytest.mark.long
def test_at_160_gb_no_row_has_its_continuation_beside_it() -> None:
    """What was: 65 to 75 blocks, 6 % of the rows beside their continuation, whatever the size of a block."""
    before = at_large_batches(spread=False, block_tokens=FORMER_BLOCK)
    smaller = at_large_batches(spread=False, block_tokens=BLOCK_TOKENS)
    now = at_large_batches(spread=True, block_tokens=BLOCK_TOKENS)
    assert before.regions < 80
    assert min(before.continued, smaller.continued) > 0.055
    assert max(now.continued, now.near) < 0.005
    assert now.regions > 200
    assert now.largest < 0.01
    assert now.amplification <= before.amplification
    assert now.read_bytes > 500_000
    larger = at_large_batches(spread=True, block_tokens=FORMER_BLOCK)  # of corpora that were built before
    assert larger.continued < 0.005


@pytest.mark.long
@pytest.mark.parametrize(("batch", "length"), [(256, 128), (30_000, 512)])
def test_other_batches_are_spread_too(batch: int, length: int) -> None:
    found = expected_radius([1e9], batch=batch, length=length, is_spread=True, block_tokens=BLOCK_TOKENS)
    assert found.continued < 0.005


@pytest.mark.long
@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(4, 30), min_size=1, max_size=6), st.integers(1, 12), st.sampled_from([1, 4]))
def test_the_measure_is_what_counting_by_hand_finds(blocks: list[int], batch: int, stretches: int) -> None:
    window = {"samples": 3 * batch, "least_tokens": 1, "stretches": stretches}
    plan = plan_of([blocks], window=window)
    table = make_block_table([(0, 0, 10 * n, n, 1, 1) for n in blocks], [""] * len(blocks), ["s"])
    total = plan.epoch_layout.samples_per_epoch
    if batch > total:
        with pytest.raises(PlanError, match=r"\bbatch\b.*\bepoch\b"):
            shuffle_radius(plan, [table], batch)
        return
    found = shuffle_radius(plan, [table], batch)
    continued, near, regions = [], [], []
    for start in np.unique(np.linspace(0, total // batch - 1, 16, dtype=np.int64)) * batch:
        origins = [plan.origin_of_sample(0, sample) for sample in range(int(start), int(start) + batch)]
        places = {(one.block, one.row) for one in origins}
        continued += [(block, row + 1) in places for block, row in places]
        near += [any((b, r + d) in places for d in range(-NEAR_ROWS, NEAR_ROWS + 1) if d) for b, r in places]
        regions.append(len({block for block, _ in places}))
    assert found.continued == pytest.approx(np.mean(continued))
    assert found.near == pytest.approx(np.mean(near))
    assert found.regions == pytest.approx(np.mean(regions))
    assert found.amplification >= 1
