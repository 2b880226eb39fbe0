"""Lanes of a stream: steps continue each other, and whole steps of every source fill windows and epochs."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.errors import PlanError
from data_service.samples.samples import Samples
from data_service.samples.spec import SourceSpec, StreamSpec
from data_service.stream.order import LaneOrder
from data_service.stream.positions import PhaseBatches, StepSampleRanges
from data_service.stream.stream import Stream
from tests.support.data.corpora import plan_of, random_block, source_of, spec_of, write_corpus, write_vocabulary

REUSE, LENGTH, LANES = 16, 45, 6


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[SourceSpec, SourceSpec]:
    folder = tmp_path_factory.mktemp("corpora")
    large = write_corpus(folder / "large", [random_block(seed, 6000) for seed in range(3)])
    small = write_corpus(folder / "small", [random_block(9, 2000)])
    for uri in (large, small):
        write_vocabulary(uri)
    return source_of(large, "large"), source_of(small, "small")


def lanes_spec(*sources: SourceSpec, **settings: object) -> StreamSpec:
    return spec_of(
        *sources,
        **{
            "input": {"packing": "lanes", "reuse": REUSE},
            "masking": {"kind": "plm", "predict": 7},
            "length": LENGTH,
            "lanes": LANES,
            "window": {"samples": 10 * LANES, "least_tokens": 1},
            **settings,
        },
    )


def reused(samples: Samples) -> np.ndarray:
    return samples.tokens.reshape(-1, LENGTH)[:, :REUSE]


def test_each_lane_of_a_step_continues_itself(sources: tuple[SourceSpec, SourceSpec]) -> None:
    """Inside a window and a block the next row begins where this one's reused part ends, in its own direction."""
    stream = Stream(lanes_spec(sources[0]))
    positions = StepSampleRanges([PhaseBatches.from_samples(40, LANES, stream.samples_per_epoch)])
    continued = 0
    for step, following in pairwise(range(40)):
        (now,), (then,) = positions.ranges_of_step(step), positions.ranges_of_step(following)
        assert now.start % LANES == then.start % LANES == 0
        grid = stream.plan.epoch_layout
        same_window = now.epoch == then.epoch and grid.window_with_sample(now.start) == grid.window_with_sample(
            then.start
        )
        rows, coming = (stream.read(r.epoch, r.start, r.stop) for r in (now, then))
        assert rows.reversed_rows is not None
        assert rows.reversed_rows.tolist() == [False, True] * (LANES // 2)
        for lane in range(LANES):
            one, two = (stream.plan.origin_of_sample(r.epoch, r.start + lane) for r in (now, then))
            if same_window and (one.block, one.epoch) == (two.block, two.epoch):
                continued += 1
                # The row's text after its reused part begins A, and is the next row's reused part.
                assert rows.segment_starts is not None
                size = min(REUSE, int(rows.segment_starts[lane]) - 1 - REUSE)
                here = rows.tokens.reshape(-1, LENGTH)[lane, REUSE : REUSE + size]
                np.testing.assert_array_equal(reused(coming)[lane, :size], here)
                assert two.row - one.row == (-2 if lane % 2 else 2)
    assert continued > 0.7 * 39 * LANES


def test_too_little_text_is_refused(sources: tuple[SourceSpec, SourceSpec]) -> None:
    with pytest.raises(PlanError, match=r"\blarge \(.*\b100000 lanes\b"):
        Stream(lanes_spec(sources[0], lanes=100_000))
    with pytest.raises(PlanError, match=r"\blarge \(.*\b60000 tokens\b.*\btrain\b"):
        Stream(lanes_spec(sources[0], length=60_000))
    thin = [s.model_copy(update={"weight": w}) for s, w in zip(sources, (1e6, 1.0), strict=True)]
    with pytest.raises(PlanError, match=r"\bsmall \(.*\blanes\b"):
        Stream(lanes_spec(*thin))


def test_lanes_and_permuted_prediction_go_together() -> None:
    source = SourceSpec(name="x", uri="x", manifest_fingerprint="x")
    for settings in ({"masking": {"kind": "mlm"}}, {"input": {"packing": "contiguous"}}):
        with pytest.raises(ValueError, match=r"\bplm\b.*\blanes\b"):
            lanes_spec(source, **settings)
    with pytest.raises(ValueError, match=r"\bplm\b.*\blanes\b"):
        spec_of(source, lanes=4)
    with pytest.raises(PlanError, match=r"\b5 lanes\b"):
        lanes_spec(source, lanes=5)


@given(st.integers(1, 6), st.integers(1, 9), st.sampled_from([1, 2]))
def test_lanes_go_on_in_their_direction(pairs: int, steps: int, directions: int) -> None:
    lanes = pairs * directions
    order = LaneOrder(lanes * steps, lanes, directions)
    rows = order.items_at(np.arange(lanes * steps)).reshape(steps, lanes)
    for lane in range(lanes):
        direction = lane % directions
        assert (rows[:, lane] % directions == direction).all()
        assert (np.diff(rows[:, lane] // directions) == (-1 if direction else 1)).all()


@given(
    st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=6), min_size=1, max_size=3),
    st.integers(1, 4),
    st.integers(0, 3),
    st.booleans(),
)
def test_windows_of_a_plan_are_whole_steps_of_every_source(
    windows_of_text: list[list[int]], pairs: int, epoch: int, weighted: bool
) -> None:
    lanes = 2 * pairs
    counts = [[2 * count for count in (*blocks, lanes)] for blocks in windows_of_text]
    try:
        plan = plan_of(
            counts,
            [1.0 + n for n in range(len(counts))] if weighted else None,
            input={"packing": "lanes", "reuse": 4},
            masking={"kind": "plm", "predict": 2},
            lanes=lanes,
            window={"samples": 3 * lanes, "least_tokens": 1},
        )
    except PlanError:
        assert weighted  # a share of less than a step
        return
    if not weighted:
        total = sum(map(sum, counts))
        assert plan.epoch_layout.samples_per_epoch == total // lanes * lanes
    assert all(quota % lanes == 0 for quota in plan.epoch_layout.quotas)
    for window in range(plan.epoch_layout.windows):
        made = plan.window(epoch, window)
        assert made.order.size == plan.epoch_layout.window_size(window) == sum(map(len, made.pieces))
        per_source = [sum(len(p) for p in made.pieces if p.source == s) for s in range(len(counts))]
        assert all(size % lanes == 0 for size in per_source)
        assert all(p.start % 2 == p.stop % 2 == 0 for p in made.pieces)  # both directions of a window together
