"""The plan: every row once an epoch, mixtures exact in every window, any sample found without the others."""

import re
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.errors import PlanError
from data_service.samples.spec import StreamSpec
from data_service.stream.plan import EpochLayout, StreamPlan
from tests.support.data.corpora import plan_of, rows_of_epoch, table_of

row_counts = st.lists(st.integers(1, 40), min_size=1, max_size=12)
sources = st.lists(row_counts, min_size=1, max_size=4)


@pytest.mark.long
@settings(deadline=None)
@given(sources, st.integers(0, 5), st.sampled_from([1, 5, 16]))
def test_every_row_once_an_epoch(rows: list[list[int]], epoch: int, stretches: int) -> None:
    plan = plan_of(rows, window={"samples": 7, "least_tokens": 1, "stretches": stretches})
    everything = {
        (source, block, row, epoch)
        for source, counts in enumerate(rows)
        for block, count in enumerate(counts)
        for row in range(count)
    }
    found = rows_of_epoch(plan, epoch)
    assert len(found) == len(everything) == plan.epoch_layout.samples_per_epoch
    assert set(found) == everything


@pytest.mark.long
@settings(deadline=None)
@given(sources, st.data())
def test_weights_hold_in_every_window_and_no_row_comes_twice_before_all_have_come(
    rows: list[list[int]], data: st.DataObject
) -> None:
    weights = data.draw(st.lists(st.floats(0.1, 10), min_size=len(rows), max_size=len(rows)))
    plan = plan_of(rows, weights, split="heldout")  # where a source may be too small to be read
    total = plan.epoch_layout.samples_per_epoch
    assert total == sum(map(sum, rows))
    shares = np.array(weights) / sum(weights)
    assert np.abs(np.array(plan.epoch_layout.quotas) - total * shares).max() < 1
    for window in range(plan.epoch_layout.windows):
        sizes = np.zeros(len(rows))
        for piece in plan.window(0, window).pieces:
            sizes[piece.source] += len(piece)
        assert np.abs(sizes - np.array(plan.epoch_layout.quotas) / plan.epoch_layout.windows).max() < 1
    seen = Counter(row for epoch in range(3) for row in rows_of_epoch(plan, epoch))
    assert set(seen.values()) == {1}  # the source's own epoch is part of the name
    for source, counts in enumerate(rows):
        rounds = Counter(epoch for (s, _, _, epoch) in seen if s == source)
        assert all(rounds[epoch] == sum(counts) for epoch in range(max(rounds, default=0)))


@given(st.lists(st.integers(0, 500), min_size=1, max_size=4), st.integers(1, 60), st.data())
def test_spans_cut_any_range_at_the_windows(quotas: list[int], windows: int, data: st.DataObject) -> None:
    total = sum(quotas)
    grid = EpochLayout(tuple(quotas), windows, 0)
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    spans = list(grid.split_by_window(start, stop))
    covered = [grid.window_start(window) + i for window, first, last in spans for i in range(first, last)]
    assert covered == list(range(start, stop))
    assert all(0 <= first < last <= grid.window_size(window) for window, first, last in spans)


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (0, 11), (5, 4)])
def test_ranges_outside_the_epoch_are_refused(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match=r"\bepoch\b.*\b10$"):
        list(EpochLayout((10,), 2, 0).split_by_window(start, stop))


def test_epochs_and_windows_are_shuffled() -> None:
    plan = plan_of([[20] * 50])
    first, second = rows_of_epoch(plan, 0), rows_of_epoch(plan, 1)
    same = sum(a[:3] == b[:3] for a, b in zip(first, second, strict=True))
    assert same < 10
    blocks = [block for _, block, _, _ in first]
    assert blocks != sorted(blocks)


def test_a_window_mixes_its_blocks() -> None:
    """Within a window, neighbours come from the same block as often as random order says."""
    plan = plan_of([[100] * 20], window={"samples": 2000, "least_tokens": 1})
    blocks = np.array([block for _, block, _, _ in rows_of_epoch(plan, 0)])
    together = (blocks[1:] == blocks[:-1]).mean()
    assert abs(together - 99 / 1999) < 5 * np.sqrt(0.05 * 0.95 / 1999)


def test_windows_hold_what_was_asked_for_within_memory() -> None:
    assert plan_of([[100] * 10], window={"samples": 300, "least_tokens": 1}).epoch_layout.windows == 3
    assert plan_of([[100] * 10], window={"samples": 1, "least_tokens": 2000}).epoch_layout.windows == 5
    tight = plan_of([[100] * 10], window={"samples": 300, "least_tokens": 1, "most_tokens": 1000})
    assert tight.epoch_layout.windows == 10
    assert plan_of([[3]], window={"samples": 300}).epoch_layout.windows == 1


def test_a_source_without_text_is_named() -> None:
    with pytest.raises(PlanError, match=r"s1 .*\btrain\b"):
        plan_of([[5], []])


@pytest.mark.parametrize("weights", [[0.999, 0.001], [5, 0.004, 1e-9]])
def test_a_source_that_would_never_be_read_is_refused_with_the_arithmetic(weights: list[float]) -> None:
    rows = [[40, 60]] * len(weights)
    with pytest.raises(PlanError, match=r"s1 .*\b\d00 rows\b.*weight.*\b0\.00") as raised:
        plan_of(rows, weights)
    enough = float(raised.value.remedy.split("weight to ")[1].split()[0])
    assert plan_of(rows[:2], [weights[0], 1.01 * enough]).epoch_layout.quotas[1] == 1


def test_a_source_too_small_for_evaluation_is_named_and_left_out() -> None:
    plan = plan_of([[40], [40]], [0.999, 0.001], split="heldout")
    assert plan.epoch_layout.quotas == (80, 0)
    assert len(plan.notes) == 1
    assert re.search(r"s1 \(u1\), heldout .*\b80 rows\b", plan.notes[0])
    assert plan_of([[40], [40]], [0.5, 0.5]).notes == ()


def test_the_seed_and_the_corpus_decide_the_order_and_its_address_does_not() -> None:
    rows = [[9, 8, 7], [5, 5]]
    base = plan_of(rows)

    def order(spec: StreamSpec) -> list[tuple[int, int, int, int]]:
        tables, counts = tuple(map(table_of, rows)), tuple(np.array(c) for c in rows)
        return rows_of_epoch(StreamPlan(spec, tables, counts), 0)

    moved = base.spec.model_copy(
        update={"sources": tuple(s.model_copy(update={"uri": "elsewhere"}) for s in base.spec.sources)}
    )
    assert order(moved) == order(base.spec)
    assert order(base.spec.model_copy(update={"seed": 8})) != order(base.spec)
    other = tuple(s.model_copy(update={"manifest_fingerprint": "x" + s.uri}) for s in base.spec.sources)
    assert order(base.spec.model_copy(update={"sources": other})) != order(base.spec)
