"""Positions: which samples a step of training takes. They are computed without a loop over the steps before.

How much a step takes is a pure function of the step: the same batch every step, or one that rises. The batches of a
phase follow each other through an epoch and on into the next. A new phase starts a new epoch, and epoch numbers grow
over the whole run (but see `PhaseBatches.staged`). Ranges that were skipped (after a loss spike) are left out, and
later samples move up.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from data_service.errors import PlanError


@dataclass(frozen=True)
class Rise:
    """A batch that begins at `start` and grows, evenly but in multiples of `granule`, for `steps` steps."""

    start: int
    steps: int
    granule: int


@dataclass(frozen=True)
class StepBatches:
    """The batch of each step of a phase, in samples or in tokens.

    Attributes:
        batch: of every step; of those after the rise, if there is one.
        rise: None if the batch is the same from the first step.
    """

    batch: int
    rise: Rise | None = None

    def at(self, step: int) -> int:
        """Return the batch of a step, counted from 0 where the phase begins."""
        return self._levels[self._level(step)][1]

    def before(self, step: int) -> int:
        """Return what the first `step` steps take together."""
        level = self._level(step)
        first, batch = self._levels[level]
        return self._before[level] + (step - first) * batch

    def _level(self, step: int) -> int:
        return bisect_right(self._levels, step, key=lambda level: level[0]) - 1

    @cached_property
    def _levels(self) -> tuple[tuple[int, int], ...]:
        """(first step, batch) of each size that the batch has, in order."""
        if self.rise is None:
            return ((0, self.batch),)
        rise, height = self.rise, self.batch - self.rise.start
        levels = {
            -(-up * rise.steps // height): rise.start + up for up in range(0, height, rise.granule)
        }  # a rise of more than a granule a step skips sizes
        return (*levels.items(), (rise.steps, self.batch))

    @cached_property
    def _before(self) -> tuple[int, ...]:
        """What all steps before each level take."""
        edges = [first for first, _ in self._levels]
        taken = (
            (stop - first) * batch for (first, batch), stop in zip(self._levels, edges[1:], strict=False)
        )
        return (0, *accumulate(taken))


@dataclass(frozen=True)
class Range:
    """Samples `start` to `stop` of `epoch` of the stream of phase `phase`."""

    phase: int
    epoch: int
    start: int
    stop: int


class Axis(Protocol):
    """A stream measured from the start of epoch 0, in samples or in tokens."""

    def unit(self, epoch: int, sample: int) -> int:
        """Return where a sample begins."""
        ...

    def locate(self, unit: int) -> tuple[int, int]:
        """Return (epoch, sample) of the first sample that begins at `unit` or after it."""
        ...


@dataclass(frozen=True)
class SampleAxis:
    """A stream measured in samples."""

    samples_per_epoch: int

    def unit(self, epoch: int, sample: int) -> int:
        return epoch * self.samples_per_epoch + sample

    def locate(self, unit: int) -> tuple[int, int]:
        return divmod(unit, self.samples_per_epoch)


@dataclass(frozen=True)
class PhaseBatches:
    """A stretch of training on one stream.

    Attributes:
        steps: optimizer steps, at least one.
        batch: units of `axis` in a step: samples, or tokens (a step then takes the samples that begin within
            its stretch of so many tokens). The largest, if it rises.
        samples_per_epoch: of the stream.
        axis: how batches are measured out.
        rise: how the batch begins smaller and grows; None if it does not.
        staged: its stream goes on by itself where the phases before stopped, so the phase begins with its epoch 0.
    """

    steps: int
    batch: int
    samples_per_epoch: int
    axis: Axis
    rise: Rise | None = None
    staged: bool = False

    @classmethod
    def of_samples(
        cls, steps: int, batch: int, samples_per_epoch: int, rise: Rise | None = None
    ) -> "PhaseBatches":
        """Return batches of so many samples."""
        return cls(steps, batch, samples_per_epoch, SampleAxis(samples_per_epoch), rise)

    @cached_property
    def batches(self) -> StepBatches:
        """The batch of each step, counted from 0 where the phase begins."""
        return StepBatches(self.batch, self.rise)


@dataclass(frozen=True)
class _Skip:
    """Units `start` to `stop` are left out; `used` units of the phase come before them."""

    start: int
    stop: int
    used: int


class Positions:
    """The samples of every step of a run.

    Args:
        phases: in order.
        skips: ranges left out, in any order.
        begin: for a run that began from another run's checkpoint, on data of its own: the first step that takes
            samples, and those samples. The phase of that step starts there.

    Raises:
        PlanError: a phase whose epoch is smaller than one batch.
    """

    def __init__(self, phases: Sequence[PhaseBatches], skips: Sequence[Range] = (), begin: int = 0) -> None:
        self._phases = tuple(phases)
        self._ends = list(accumulate(phase.steps for phase in phases))
        self._begin = begin
        self._first_epochs: list[int] = []
        self._skips: list[list[_Skip]] = []
        epoch = 0
        for number, phase in enumerate(self._phases):
            _check_size(number, phase)
            epoch = 0 if phase.staged else epoch
            self._first_epochs.append(epoch)
            self._skips.append(_skips(phase, epoch, [skip for skip in skips if skip.phase == number]))
            used = self._used(number, self._ends[number])
            if used > 0:
                epoch = phase.axis.locate(self._unit(number, used - 1))[0] + 1

    @property
    def steps(self) -> int:
        """Steps of all phases."""
        return self._ends[-1] if self._ends else 0

    def phase_of(self, step: int) -> int:
        """Return the phase of a step, both counted from 0. Raises IndexError before the first step and after the
        last."""
        if not self._begin <= step < self.steps:
            raise IndexError(
                f"step {step} of a run of {self.steps} that takes data from step {self._begin} on"
            )
        return bisect_right(self._ends, step)

    def phase_start(self, step: int) -> int:
        """Return the first step of a step's phase. Raises IndexError as `phase_of`."""
        return self._first_step(self.phase_of(step))

    def ranges(self, step: int) -> tuple[Range, ...]:
        """Return the samples of a step, in order: one range, or more where an epoch ends or something is skipped."""
        number = self.phase_of(step)
        phase = self._phases[number]
        stretches = self._stretches(number, self._used(number, step), self._used(number, step + 1))
        return tuple(piece for start, stop in stretches for piece in _by_epoch(number, phase, start, stop))

    def _first_step(self, number: int) -> int:
        """Return the first step of a phase that takes data; if the phase ends before, the step at which it ends."""
        return max(self._ends[number] - self._phases[number].steps, self._begin)

    def _used(self, number: int, step: int) -> int:
        """Return units that the phase has taken before `step`, since its first step that takes data."""
        phase, begin = self._phases[number], self._first_step(number)
        start = self._ends[number] - phase.steps
        return phase.batches.before(step - start) - phase.batches.before(begin - start)

    def _stretches(self, number: int, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yield units of the axis for the phase's used units `first` to `last`: what lies between the skips."""
        start, stop = self._unit(number, first), self._unit(number, last - 1) + 1
        for skip in self._skips[number]:
            if start < skip.start < stop:
                yield start, skip.start
                start = skip.stop
        yield start, stop

    def _unit(self, number: int, used: int) -> int:
        """Return the unit of the axis at which `used` units of the phase have been taken."""
        skips = self._skips[number]
        passed = bisect_right(skips, used, key=lambda skip: skip.used)
        phase = self._phases[number]
        if passed:
            return skips[passed - 1].stop + used - skips[passed - 1].used
        return phase.axis.unit(self._first_epochs[number], 0) + used


def _check_size(number: int, phase: PhaseBatches) -> None:
    units = phase.axis.unit(1, 0)
    if phase.batch > units:
        raise PlanError(
            f"phase {number}: a batch of {phase.batch} is larger than an epoch of the corpus, {units}",
            remedy="use a smaller batch or more text",
        )


def _skips(phase: PhaseBatches, first_epoch: int, ranges: Sequence[Range]) -> list[_Skip]:
    """Return the phase's skips as disjoint stretches of its axis, in order.

    What lies before its first epoch is not there to be skipped: a skip in an earlier phase may have moved that up.
    """
    base = phase.axis.unit(first_epoch, 0)
    skips: list[_Skip] = []
    for start, stop in sorted(_units(phase.axis, skip) for skip in ranges if skip.epoch >= first_epoch):
        if skips and start <= skips[-1].stop:
            skips[-1] = _Skip(skips[-1].start, max(stop, skips[-1].stop), skips[-1].used)
        else:
            skipped = sum(skip.stop - skip.start for skip in skips)
            skips.append(_Skip(start, stop, start - base - skipped))
    return skips


def _units(axis: Axis, skip: Range) -> tuple[int, int]:
    return axis.unit(skip.epoch, skip.start), axis.unit(skip.epoch, skip.stop)


def _by_epoch(number: int, phase: PhaseBatches, start: int, stop: int) -> Iterator[Range]:
    """Yield the samples that begin in units `start` to `stop`, cut where an epoch ends."""
    (epoch, sample), (last_epoch, last_sample) = phase.axis.locate(start), phase.axis.locate(stop)
    while (epoch, sample) < (last_epoch, last_sample):
        end = last_sample if epoch == last_epoch else phase.samples_per_epoch
        if sample < end:
            yield Range(number, epoch, sample, end)
        epoch, sample = epoch + 1, 0
