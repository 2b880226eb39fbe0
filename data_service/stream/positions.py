"""Computes which samples a training step takes, without a loop over the earlier steps.

The batch of a step is a pure function of the step: constant, or with a batch-size warm-up. The batches of a phase
follow each other through an epoch and into the next. A new phase starts a new epoch, and epoch numbers grow over the
whole run (but see `PhaseBatches.staged`). Skipped ranges (after a loss spike) are left out, and later samples move
up.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from data_service.errors import PlanError


@dataclass(frozen=True)
class BatchRamp:
    """A batch-size warm-up: the batch grows evenly from `start`, in multiples of `granule`, for `steps` steps."""

    start: int
    steps: int
    granule: int


@dataclass(frozen=True)
class BatchSchedule:
    """The batch of each step of a phase, in samples or in tokens.

    Attributes:
        batch: batch of every step; with a warm-up, of every step after it.
        rise: batch-size warm-up; None if the batch is constant.
    """

    batch: int
    rise: BatchRamp | None = None

    def batch_at_step(self, step: int) -> int:
        """Return the batch of a step, counted from 0 where the phase begins."""
        return self._levels[self._level_at_step(step)][1]

    def units_before(self, step: int) -> int:
        """Return the number of samples or tokens in the first `step` steps together."""
        level = self._level_at_step(step)
        first, batch = self._levels[level]
        return self._units_before_levels[level] + (step - first) * batch

    def _level_at_step(self, step: int) -> int:
        """Return the index in `_levels` of the batch size at a step."""
        return bisect_right(self._levels, step, key=lambda level: level[0]) - 1

    @cached_property
    def _levels(self) -> tuple[tuple[int, int], ...]:
        """(first step, batch) for each size of the batch, in order."""
        if self.rise is None:
            return ((0, self.batch),)
        rise, height = self.rise, self.batch - self.rise.start
        # If the batch grows by more than a granule per step, some sizes are skipped.
        levels = {-(-up * rise.steps // height): rise.start + up for up in range(0, height, rise.granule)}
        return (*levels.items(), (rise.steps, self.batch))

    @cached_property
    def _units_before_levels(self) -> tuple[int, ...]:
        """Number of samples or tokens in all steps before each of `_levels`."""
        edges = [first for first, _ in self._levels]
        taken = ((stop - first) * batch for (first, batch), stop in zip(self._levels, edges[1:], strict=False))
        return (0, *accumulate(taken))


@dataclass(frozen=True)
class SampleRange:
    """Samples `start` to `stop` of `epoch` of the stream of phase `phase`."""

    phase: int
    epoch: int
    start: int
    stop: int


class StreamAxis(Protocol):
    """Counts a stream in units, which are samples or tokens, from the start of epoch 0."""

    def unit_of_sample(self, epoch: int, sample: int) -> int:
        """Return the unit at which a sample begins."""
        ...

    def sample_at_unit(self, unit: int) -> tuple[int, int]:
        """Return (epoch, sample) of the first sample that begins at `unit` or after it."""
        ...


@dataclass(frozen=True)
class SampleAxis:
    """Counts a stream in samples."""

    samples_per_epoch: int

    def unit_of_sample(self, epoch: int, sample: int) -> int:
        return epoch * self.samples_per_epoch + sample

    def sample_at_unit(self, unit: int) -> tuple[int, int]:
        return divmod(unit, self.samples_per_epoch)


@dataclass(frozen=True)
class PhaseBatches:
    """The batches of a phase, which trains on one stream.

    Attributes:
        steps: number of optimizer steps, at least one.
        batch: number of units of `axis` in a step, samples or tokens; with a warm-up, after it. In tokens, a step takes
            the samples that begin within its range of tokens.
        samples_per_epoch: number of samples in an epoch of the stream.
        axis: axis that counts the units of a batch.
        rise: batch-size warm-up; None if the batch is constant.
        staged: whether the stream itself continues where the earlier phases ended, so that the phase begins with the
            stream's epoch 0.
    """

    steps: int
    batch: int
    samples_per_epoch: int
    axis: StreamAxis
    rise: BatchRamp | None = None
    staged: bool = False

    @classmethod
    def from_samples(
        cls, steps: int, batch: int, samples_per_epoch: int, warmup: BatchRamp | None = None
    ) -> "PhaseBatches":
        """Return a phase whose batches count samples."""
        return cls(steps, batch, samples_per_epoch, SampleAxis(samples_per_epoch), warmup)

    @cached_property
    def batches(self) -> BatchSchedule:
        """The batch of each step, counted from 0 where the phase begins."""
        return BatchSchedule(self.batch, self.rise)


@dataclass(frozen=True)
class _SkippedUnits:
    """Units `start` to `stop` of the axis are skipped. Before them, the phase uses `used` units."""

    start: int
    stop: int
    used: int


class StepSampleRanges:
    """Finds the samples of every step of a training run.

    Args:
        phases: phases of the run, in order.
        skips: ranges that are skipped, in any order.
        begin: first step that takes samples; the phase of that step starts its data there. It is not 0 if the run
            continues another run's checkpoint on its own data.

    Raises:
        PlanError: a batch of a phase is larger than its epoch.
    """

    def __init__(self, phases: Sequence[PhaseBatches], skips: Sequence[SampleRange] = (), begin: int = 0) -> None:
        self._phases = tuple(phases)
        self._ends = list(accumulate(phase.steps for phase in phases))
        self._begin = begin
        self._first_epochs: list[int] = []
        self._skips: list[list[_SkippedUnits]] = []
        epoch = 0
        for number, phase in enumerate(self._phases):
            _check_batch_fits(number, phase)
            epoch = 0 if phase.staged else epoch
            self._first_epochs.append(epoch)
            self._skips.append(_merge_skips(phase, epoch, [skip for skip in skips if skip.phase == number]))
            used = self._units_used(number, self._ends[number])
            if used > 0:
                epoch = phase.axis.sample_at_unit(self._unit_after_used(number, used - 1))[0] + 1

    @property
    def steps(self) -> int:
        """Number of steps of all phases."""
        return self._ends[-1] if self._ends else 0

    def phase_at_step(self, step: int) -> int:
        """Return the phase of a step, both counted from 0.

        Raises IndexError: the step is before the first step that takes data, or after the last.
        """
        if not self._begin <= step < self.steps:
            raise IndexError(
                f"step {step} takes no data: the run has {self.steps} steps and takes data from step {self._begin} on"
            )
        return bisect_right(self._ends, step)

    def first_step_of_phase(self, step: int) -> int:
        """Return the first step that takes data in a step's phase. Raises IndexError as `phase_at_step`."""
        return self._first_data_step(self.phase_at_step(step))

    def ranges_of_step(self, step: int) -> tuple[SampleRange, ...]:
        """Return the samples of a step in order: one range, or several around an epoch's end or a skipped range."""
        number = self.phase_at_step(step)
        phase = self._phases[number]
        stretches = self._used_unit_ranges(number, self._units_used(number, step), self._units_used(number, step + 1))
        return tuple(piece for start, stop in stretches for piece in _split_by_epoch(number, phase, start, stop))

    def ranges_of_steps(self, start: int, stop: int) -> tuple[SampleRange, ...]:
        """Return the samples of steps `start` to `stop`, in order; adjacent ranges are joined."""
        found: list[SampleRange] = []
        for span in (span for step in range(start, stop) for span in self.ranges_of_step(step)):
            last = found[-1] if found else None
            if last and (last.phase, last.epoch, last.stop) == (span.phase, span.epoch, span.start):
                found[-1] = SampleRange(span.phase, span.epoch, last.start, span.stop)
            else:
                found.append(span)
        return tuple(found)

    def find_step(self, phase: int, epoch: int, sample: int) -> tuple[int, int] | None:
        """Return (step, row): the step of a phase that takes a sample, and the sample's number in it. None if no step
        takes it: the sample is skipped, or comes before or after the phase."""
        begin, end = self._first_data_step(phase), self._ends[phase]
        unit = self._phases[phase].axis.unit_of_sample(epoch, sample)
        steps = range(begin, end)
        index = (
            bisect_right(steps, unit, key=lambda step: self._unit_after_used(phase, self._units_used(phase, step))) - 1
        )
        if index < 0:
            return None
        row = 0
        for span in self.ranges_of_step(steps[index]):
            if span.epoch == epoch and span.start <= sample < span.stop:
                return steps[index], row + sample - span.start
            row += span.stop - span.start
        return None

    def epochs_of_phase(self, phase: int) -> range:
        """Return the epochs of which a phase may take samples."""
        used, locate = self._units_used(phase, self._ends[phase]), self._phases[phase].axis.sample_at_unit
        if used <= 0:
            return range(0)
        return range(locate(self._unit_after_used(phase, 0))[0], locate(self._unit_after_used(phase, used - 1))[0] + 1)

    def _first_data_step(self, number: int) -> int:
        """Return the first step of a phase that takes data; if none does, the step at which the phase ends."""
        return max(self._ends[number] - self._phases[number].steps, self._begin)

    def _units_used(self, number: int, step: int) -> int:
        """Return the number of units that the phase has used before `step`, from its first step that takes data on."""
        phase, begin = self._phases[number], self._first_data_step(number)
        start = self._ends[number] - phase.steps
        return phase.batches.units_before(step - start) - phase.batches.units_before(begin - start)

    def _used_unit_ranges(self, number: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield ranges (start, stop) of the axis: units `first` to `last` of those that the phase uses."""
        start, stop = self._unit_after_used(number, first), self._unit_after_used(number, last - 1) + 1
        for skip in self._skips[number]:
            if start < skip.start < stop:
                yield start, skip.start
                start = skip.stop
        yield start, stop

    def _unit_after_used(self, number: int, used: int) -> int:
        """Return the unit of the axis that the phase uses next after its first `used` units."""
        skips = self._skips[number]
        passed = bisect_right(skips, used, key=lambda skip: skip.used)
        phase = self._phases[number]
        if passed:
            return skips[passed - 1].stop + used - skips[passed - 1].used
        return phase.axis.unit_of_sample(self._first_epochs[number], 0) + used


def _check_batch_fits(number: int, phase: PhaseBatches) -> None:
    units = phase.axis.unit_of_sample(1, 0)
    if phase.batch > units:
        raise PlanError(
            f"phase {number}: a batch of {phase.batch} is larger than an epoch of the corpus, {units}",
            remedy="use a smaller batch or more text",
        )


def _merge_skips(phase: PhaseBatches, first_epoch: int, ranges: Sequence[SampleRange]) -> list[_SkippedUnits]:
    """Return the phase's skipped ranges, joined where they overlap, in order.

    Ranges before the phase's first epoch are ignored: a skip in an earlier phase may have changed its first epoch.
    """
    base = phase.axis.unit_of_sample(first_epoch, 0)
    skips: list[_SkippedUnits] = []
    for start, stop in sorted(_units_of_range(phase.axis, skip) for skip in ranges if skip.epoch >= first_epoch):
        if skips and start <= skips[-1].stop:
            skips[-1] = _SkippedUnits(skips[-1].start, max(stop, skips[-1].stop), skips[-1].used)
        else:
            skipped = sum(skip.stop - skip.start for skip in skips)
            skips.append(_SkippedUnits(start, stop, start - base - skipped))
    return skips


def _units_of_range(axis: StreamAxis, skip: SampleRange) -> tuple[int, int]:
    return axis.unit_of_sample(skip.epoch, skip.start), axis.unit_of_sample(skip.epoch, skip.stop)


def _split_by_epoch(number: int, phase: PhaseBatches, start: int, stop: int) -> Iterator[SampleRange]:
    """Yield the samples that begin in units `start` to `stop`, cut where an epoch ends."""
    (epoch, sample), (last_epoch, last_sample) = (
        phase.axis.sample_at_unit(start),
        phase.axis.sample_at_unit(stop),
    )
    while (epoch, sample) < (last_epoch, last_sample):
        end = last_sample if epoch == last_epoch else phase.samples_per_epoch
        if sample < end:
            yield SampleRange(number, epoch, sample, end)
        epoch, sample = epoch + 1, 0
