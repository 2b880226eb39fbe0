"""Positions: the closed form against taking batches one after the other; batches that rise, against a literal
statement.
"""

from dataclasses import dataclass
from itertools import accumulate

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from data_service.errors import PlanError
from data_service.stream.positions import BatchRamp, BatchSchedule, PhaseBatches, SampleRange, StepSampleRanges


@st.composite
def rising(draw: st.DrawFn) -> BatchSchedule:
    granule = draw(st.integers(1, 5))
    start = granule * draw(st.integers(1, 4))
    batch = start + granule * draw(st.integers(1, 30))
    return BatchSchedule(batch, BatchRamp(start, draw(st.integers(1, 50)), granule))


@given(rising())
def test_a_batch_rises_evenly_in_whole_granules(batches: BatchSchedule) -> None:
    rise = batches.rise
    assert rise is not None
    height = batches.batch - rise.start
    literal = [
        rise.start + height * step // rise.steps // rise.granule * rise.granule for step in range(rise.steps)
    ] + [batches.batch] * 3
    assert [batches.batch_at_step(step) for step in range(len(literal))] == literal
    assert literal[0] == rise.start
    assert [batches.units_before(step) for step in range(len(literal) + 1)] == [0, *accumulate(literal)]


def test_a_batch_that_does_not_rise() -> None:
    assert [BatchSchedule(7).batch_at_step(step) for step in (0, 9)] == [7, 7]
    assert [BatchSchedule(7).units_before(step) for step in (0, 9)] == [0, 63]


@given(rising(), st.integers(1, 60), st.integers(0, 59))
def test_steps_take_their_batches_one_after_another(batches: BatchSchedule, steps: int, begin: int) -> None:
    """Also where a run's data begins within the rise."""
    begin, epoch = min(begin, steps - 1), batches.batch + 3
    phases = [PhaseBatches.from_samples(steps, batches.batch, epoch, batches.rise)]
    phases.append(PhaseBatches.from_samples(2, 2, 10))
    positions = StepSampleRanges(phases, begin=begin)
    at = 0
    for step in range(begin, steps):
        taken = [r.epoch * epoch + n for r in positions.ranges_of_step(step) for n in range(r.start, r.stop)]
        assert taken == list(range(at, at + batches.batch_at_step(step)))
        at += len(taken)
    (following,) = positions.ranges_of_step(steps)
    assert (following.phase, following.start) == (1, 0)
    assert following.epoch == (at - 1) // epoch + 1


@dataclass(frozen=True)
class UnevenAxis:
    """An epoch of samples of these lengths, measured in tokens."""

    lengths: tuple[int, ...]

    def unit_of_sample(self, epoch: int, sample: int) -> int:
        return epoch * sum(self.lengths) + sum(self.lengths[:sample])

    def sample_at_unit(self, unit: int) -> tuple[int, int]:
        epoch, rest = divmod(unit, sum(self.lengths))
        for sample in range(len(self.lengths)):
            if sum(self.lengths[:sample]) >= rest:
                return epoch, sample
        return epoch + 1, 0


def samples(ranges: tuple[SampleRange, ...]) -> list[tuple[int, int]]:
    assert all(r.start < r.stop for r in ranges)
    return [(r.epoch, sample) for r in ranges for sample in range(r.start, r.stop)]


sample_phases = st.lists(
    st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(0, 15)), min_size=1, max_size=3
).map(lambda sizes: [PhaseBatches.from_samples(steps, batch, batch + more) for steps, batch, more in sizes])

Skips = list[tuple[int, int, int, int]]
drawn_skips = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 6), st.integers(0, 20), st.integers(1, 12)), max_size=4
)


def skips_of(phases: list[PhaseBatches], drawn: Skips) -> list[SampleRange]:
    """Skips of samples that exist, in any phase and epoch: (phase, epoch, start, length)."""
    sizes = [phase.samples_per_epoch for phase in phases]
    return [
        SampleRange(phase, epoch, start, min(start + n, sizes[phase]))
        for phase, epoch, start, n in drawn
        if phase < len(phases) and start < sizes[phase]
    ]


def one_by_one(phases: list[PhaseBatches], skips: list[SampleRange]) -> list[list[tuple[int, int]]]:
    """Each step's samples, taken one after the other."""
    steps, epoch = [], 0
    for number, phase in enumerate(phases):
        left_out = {(s.epoch, i) for s in skips if s.phase == number for i in range(s.start, s.stop)}
        sample = 0
        for _ in range(phase.steps):
            taken: list[tuple[int, int]] = []
            while len(taken) < phase.batch:
                if sample == phase.samples_per_epoch:
                    epoch, sample = epoch + 1, 0
                if (epoch, sample) not in left_out:
                    taken.append((epoch, sample))
                sample += 1
            steps.append(taken)
        epoch = steps[-1][-1][0] + 1
    return steps


@given(sample_phases, drawn_skips)
def test_every_step_takes_what_follows_the_step_before(phases: list[PhaseBatches], drawn: Skips) -> None:
    skips = skips_of(phases, drawn)
    positions, literal = StepSampleRanges(phases, skips), one_by_one(phases, skips)
    assert [samples(positions.ranges_of_step(step)) for step in range(positions.steps)] == literal


@settings(max_examples=40)
@given(sample_phases, drawn_skips, st.data())
def test_the_step_of_a_sample_is_the_one_that_takes_it(
    phases: list[PhaseBatches], drawn: Skips, data: st.DataObject
) -> None:
    steps = sum(phase.steps for phase in phases)
    positions = StepSampleRanges(phases, skips_of(phases, drawn), data.draw(st.integers(0, steps - 1)))
    takers, phase_epochs = {}, [set[int]() for _ in phases]
    for step in range(positions.steps):
        try:
            taken = positions.ranges_of_step(step)
        except IndexError:
            continue  # it is before the data begin
        for row, (epoch, sample) in enumerate(samples(taken)):
            takers[taken[0].phase, epoch, sample] = (step, row)
            phase_epochs[taken[0].phase].add(epoch)
    for number, phase in enumerate(phases):
        assert set(positions.epochs_of_phase(number)) >= phase_epochs[number]
        for epoch in range(max(phase_epochs[number], default=0) + 2):
            for sample in range(phase.samples_per_epoch):
                expected = takers.get((number, epoch, sample))
                assert positions.find_step(number, epoch, sample) == expected


@given(st.lists(st.integers(1, 9), min_size=3, max_size=12), st.integers(1, 30), st.integers(1, 25))
def test_the_step_of_a_sample_of_token_batches(lengths: list[int], batch: int, steps: int) -> None:
    assume(batch <= sum(lengths))
    positions = StepSampleRanges([PhaseBatches(steps, batch, len(lengths), UnevenAxis(tuple(lengths)))])
    takers = {
        place: (step, row) for step in range(steps) for row, place in enumerate(samples(positions.ranges_of_step(step)))
    }
    for epoch in range(positions.epochs_of_phase(0).stop + 1):
        for sample in range(len(lengths)):
            assert positions.find_step(0, epoch, sample) == takers.get((epoch, sample))


@given(st.lists(st.integers(1, 9), min_size=3, max_size=12), st.integers(1, 30), st.integers(1, 25))
def test_token_batches_take_every_sample_once(lengths: list[int], batch: int, steps: int) -> None:
    assume(batch <= sum(lengths))
    axis = UnevenAxis(tuple(lengths))
    positions = StepSampleRanges([PhaseBatches(steps, batch, len(lengths), axis)])
    found = [samples(positions.ranges_of_step(step)) for step in range(steps)]
    laid_end_to_end = [sample for taken in found for sample in taken]
    epoch, sample = axis.sample_at_unit(steps * batch)
    assert laid_end_to_end == [divmod(i, len(lengths)) for i in range(epoch * len(lengths) + sample)]
    for step, taken in enumerate(found):  # the error never adds up
        tokens = sum(lengths[sample] for _, sample in taken)
        assert abs(tokens - batch) < max(lengths), (step, taken)


def test_token_batches_skip_too() -> None:
    axis = UnevenAxis((3, 5, 2, 4, 6))
    phases = [PhaseBatches(6, 8, 5, axis)]
    before = StepSampleRanges(phases)
    skipped = before.ranges_of_step(1)
    after = StepSampleRanges(phases, skipped)
    assert after.ranges_of_step(0) == before.ranges_of_step(0)
    left_out = set(samples(skipped))
    found = [sample for step in range(5) for sample in samples(after.ranges_of_step(step))]
    everything = [divmod(i, 5) for i in range(25)]
    assert found == [sample for sample in everything if sample not in left_out][: len(found)]
    assert len(found) > 8


@given(sample_phases, st.integers(0, 40))
def test_data_may_begin_at_a_later_step(phases: list[PhaseBatches], begin: int) -> None:
    """The steps from there on take what a run of the remaining steps would take from its first step on."""
    total = sum(phase.steps for phase in phases)
    assume(begin < total)
    left, passed = [], begin
    for number, phase in enumerate(phases):
        gone = min(passed, phase.steps)
        passed -= gone
        if phase.steps > gone:
            rest = PhaseBatches.from_samples(phase.steps - gone, phase.batch, phase.samples_per_epoch)
            left.append((number, rest))
    positions = StepSampleRanges(phases, begin=begin)
    literal = one_by_one([phase for _, phase in left], [])
    assert [samples(positions.ranges_of_step(step)) for step in range(begin, total)] == literal
    assert positions.first_step_of_phase(begin) == begin
    for step in range(begin, total):
        assert {r.phase for r in positions.ranges_of_step(step)} == {positions.phase_at_step(step)}
    with pytest.raises(IndexError, match=rf"\bstep {begin}\b"):
        positions.ranges_of_step(begin - 1)


def test_the_last_step_of_a_long_run_is_found_at_once() -> None:
    positions = StepSampleRanges([PhaseBatches.from_samples(10**9, 8192, 78_125_123)])
    (found,) = positions.ranges_of_step(123_456_789)
    assert (found.epoch, found.start) == divmod(123_456_789 * 8192, 78_125_123)


def test_a_batch_larger_than_an_epoch_is_refused() -> None:
    with pytest.raises(PlanError, match=r"\b11\b.*\b10\b"):
        StepSampleRanges([PhaseBatches.from_samples(1, 11, 10)])


@pytest.mark.parametrize("step", [-1, 5])
def test_steps_outside_the_run_are_refused(step: int) -> None:
    with pytest.raises(IndexError, match=rf"\bstep {step}\b.*\b5\b"):
        StepSampleRanges([PhaseBatches.from_samples(5, 2, 10)]).ranges_of_step(step)
