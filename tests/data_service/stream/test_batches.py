"""Batches that rise, against a literal statement."""

from itertools import accumulate

from hypothesis import given
from hypothesis import strategies as st

from data_service.stream.batches import Rise, StepBatches
from data_service.stream.positions import PhaseBatches, Positions


@st.composite
def rising(draw: st.DrawFn) -> StepBatches:
    granule = draw(st.integers(1, 5))
    start = granule * draw(st.integers(1, 4))
    batch = start + granule * draw(st.integers(1, 30))
    return StepBatches(batch, Rise(start, draw(st.integers(1, 50)), granule))


@given(rising())
def test_a_batch_rises_evenly_in_whole_granules(batches: StepBatches) -> None:
    rise = batches.rise
    assert rise is not None
    height = batches.batch - rise.start
    literal = [
        rise.start + height * step // rise.steps // rise.granule * rise.granule for step in range(rise.steps)
    ] + [batches.batch] * 3
    assert [batches.at(step) for step in range(len(literal))] == literal
    assert literal[0] == rise.start
    assert [batches.before(step) for step in range(len(literal) + 1)] == [0, *accumulate(literal)]


def test_a_batch_that_does_not_rise() -> None:
    assert [StepBatches(7).at(step) for step in (0, 9)] == [7, 7]
    assert [StepBatches(7).before(step) for step in (0, 9)] == [0, 63]


@given(rising(), st.integers(1, 60), st.integers(0, 59))
def test_steps_take_their_batches_one_after_another(batches: StepBatches, steps: int, begin: int) -> None:
    """Also where a run's data begins within the rise."""
    begin, epoch = min(begin, steps - 1), batches.batch + 3
    phases = [PhaseBatches.of_samples(steps, batches.batch, epoch, batches.rise)]
    phases.append(PhaseBatches.of_samples(2, 2, 10))
    positions = Positions(phases, begin=begin)
    at = 0
    for step in range(begin, steps):
        taken = [r.epoch * epoch + n for r in positions.ranges(step) for n in range(r.start, r.stop)]
        assert taken == list(range(at, at + batches.at(step)))
        at += len(taken)
    (following,) = positions.ranges(steps)
    assert (following.phase, following.start) == (1, 0)
    assert following.epoch == (at - 1) // epoch + 1
