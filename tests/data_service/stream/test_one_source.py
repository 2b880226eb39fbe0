"""Batches of one source each: exact at any place, in proportion, and no row twice in an epoch, whatever the sizes."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.errors import PlanError
from data_service.stream.mixture import source_weights
from data_service.stream.plan import StreamPlan
from data_service.stream.positions import PhaseBatches, SampleRange, StepSampleRanges
from tests.support.data.corpora import plan_of, rows_of_epoch

weights = st.one_of(st.none(), st.lists(st.floats(0.2, 5), min_size=4, max_size=4))
stretches = st.sampled_from([1, 16])


@st.composite
def plans(draw: st.DrawFn, split: str = "train") -> StreamPlan:
    """Up to four sources of one or more batches each, in blocks of any size."""
    batch = draw(st.integers(1, 9))
    blocks = st.lists(st.integers(1, 40), min_size=1, max_size=8)
    rows = draw(st.lists(blocks.filter(lambda counts: sum(counts) >= batch), min_size=1, max_size=4))
    given_weights = draw(weights)
    samples = draw(st.integers(1, 60))
    try:
        return plan_of(
            rows,
            None if given_weights is None else given_weights[: len(rows)],
            one_source=batch,
            temperature=1.0 if given_weights else draw(st.sampled_from([1.0, 1.5, 2.0, 7.0])),
            window={"samples": samples, "least_tokens": 1, "stretches": draw(stretches)},
        )
    except PlanError:  # a weight that is less than a batch
        return plan_of(rows, None, one_source=batch)


def batches(plan: StreamPlan, epoch: int) -> Iterator[list[tuple[int, int, int, int]]]:
    rows, batch = rows_of_epoch(plan, epoch), plan.spec.one_source
    assert batch is not None
    assert len(rows) % batch == 0
    return (rows[start : start + batch] for start in range(0, len(rows), batch))


@pytest.mark.long
@settings(deadline=None)
@given(plans(), st.integers(0, 5))
def test_every_batch_is_of_one_source_and_no_row_comes_twice_in_an_epoch(plan: StreamPlan, epoch: int) -> None:
    seen: Counter[tuple[int, int, int]] = Counter()
    for batch in batches(plan, epoch):
        assert len({source for source, _, _, _ in batch}) == 1
        seen.update(row[:3] for row in batch)
    assert set(seen.values()) == {1}
    assert len(seen) == plan.epoch_layout.samples_per_epoch


@pytest.mark.long
@pytest.mark.heavy
@settings(deadline=None, max_examples=25)
@given(plans())
def test_rows_of_a_source_come_alike_often_over_the_epochs(plan: StreamPlan) -> None:
    """What an epoch leaves over, the next begins with: nothing is left out for good."""
    seen = Counter(row[:3] for epoch in range(5) for row in rows_of_epoch(plan, epoch))
    for source, quota in enumerate(plan.epoch_layout.quotas):
        counts = [count for (number, _, _), count in seen.items() if number == source]
        rows = int(plan.lines[source].shuffled_blocks(0).ends[-1])
        assert max(counts) - (min(counts) if len(counts) == rows else 0) <= 1
        assert sum(counts) == 5 * quota


@pytest.mark.long
@settings(deadline=None)
@given(plans())
def test_sources_have_their_share_of_an_epoch_and_of_every_window(plan: StreamPlan) -> None:
    """To a batch; and one batch more in proportion would take more rows than some source has."""
    spec, batch = plan.spec, plan.spec.one_source
    assert batch is not None
    rows = [int(plan.lines[source].shuffled_blocks(0).ends[-1]) for source in range(len(spec.sources))]
    whole = [count // batch for count in rows]
    share = source_weights(spec.sources, whole, spec.temperature) or whole
    counts = [quota // batch for quota in plan.epoch_layout.quotas]
    total = sum(counts)
    assert all(0 < count <= most for count, most in zip(counts, whole, strict=True))
    for count, weight in zip(counts, share, strict=True):
        assert abs(count - total * weight / sum(share)) < 1.001
    longest = min(most * sum(share) / weight for most, weight in zip(whole, share, strict=True))
    assert longest - 1.001 <= total <= longest + 1e-6
    for window in range(plan.epoch_layout.windows):
        sizes = [0] * len(rows)
        for piece in plan.window(0, window).pieces:
            sizes[piece.source] += len(piece)
        for size, count in zip(sizes, counts, strict=True):
            assert abs(size / batch - count / plan.epoch_layout.windows) < 1


@pytest.mark.long
@settings(deadline=None)
@given(plans(), st.integers(1, 12), st.lists(st.integers(0, 11), max_size=4), st.data())
def test_every_step_of_a_run_is_of_one_source_though_steps_are_skipped(
    plan: StreamPlan, steps: int, skipped: list[int], data: st.DataObject
) -> None:
    batch, size = plan.spec.one_source, plan.epoch_layout.samples_per_epoch
    assert batch is not None
    phases = [PhaseBatches.from_samples(steps, batch, size), PhaseBatches.from_samples(3, batch, size)]
    whole = StepSampleRanges(phases)
    skips = [lost for step in skipped if step < whole.steps for lost in whole.ranges_of_step(step)]
    positions = StepSampleRanges(phases, skips)
    step = data.draw(st.integers(0, positions.steps - 1))
    (found,) = positions.ranges_of_step(step)
    assert isinstance(found, SampleRange)
    rows = rows_of_epoch(plan, found.epoch)[found.start : found.stop]
    assert len(rows) == batch
    assert len({source for source, _, _, _ in rows}) == 1


def test_sources_take_turns_at_random_and_small_ones_are_not_all_in_one_window() -> None:
    plan = plan_of([[400]] * 2 + [[20]] * 10, one_source=10, window={"samples": 160, "least_tokens": 1})
    turns = np.array([batch[0][0] for batch in batches(plan, 0)])
    assert (turns[1:] != turns[:-1]).sum() > 20
    sizes = [plan.epoch_layout.window_size(window) for window in range(plan.epoch_layout.windows)]
    assert max(sizes) < 1.5 * min(sizes)


def test_neighbours_in_the_text_go_to_different_batches() -> None:
    plan = plan_of([[800], [800]], one_source=50, window={"samples": 1600, "least_tokens": 1, "stretches": 16})
    for batch in batches(plan, 0):
        rows = np.sort([row for _, _, row, _ in batch])
        assert np.diff(rows).min() >= 16


def test_a_source_with_less_than_a_batch_is_named() -> None:
    with pytest.raises(PlanError, match=r"s1 \(u1\).*\b7 rows\b.*\b8\b"):
        plan_of([[30], [7]], one_source=8)


def test_a_source_whose_weight_is_less_than_a_batch_is_named() -> None:
    with pytest.raises(PlanError, match=r"s0 \(u0\).*\b2 batches\b"):
        plan_of([[30], [30]], [0.01, 1.0], one_source=15)


@pytest.mark.parametrize(("temperature", "ratio"), [(1.0, 16.0), (2.0, 4.0), (4.0, 2.0)])
def test_temperature_flattens_the_shares_of_sources(temperature: float, ratio: float) -> None:
    plan = plan_of([[1600], [100]], one_source=1, temperature=temperature)
    assert plan.epoch_layout.quotas == (100 * ratio, 100)
    mixed = plan_of([[1600], [100]], temperature=temperature)
    assert mixed.epoch_layout.samples_per_epoch == 1700
    assert abs(mixed.epoch_layout.quotas[0] - 1700 * ratio / (1 + ratio)) <= 1
