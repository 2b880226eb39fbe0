"""The kernel trial: finds out which kernels give correct results for a network on this machine, and which are fast.

Kernels are tried one after the other in a separate process (`kernel_attempts.py`, `trial_process.py`). A kernel that
raises an error or gives wrong results is not used. Neither is a kernel that hangs, ends the process, changes torch's
settings or breaks later computation; then the remaining kernels are tried in a new process.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from encoder_core.layers.kernel_choice import Kernel, Place, Preference
from encoder_core.trials.trial_network import TrialSubject, torch_settings
from encoder_core.trials.trial_process import Deadline, Report, TrialEnded, run_trial_process

TRIAL_FUNCTION = "encoder_core.trials.kernel_attempts:serve"  # what the separate process runs
MAX_ERROR_CHARACTERS = 500  # largest number of characters of a failure's text
_QUICKER_SHARE = 0.9  # a kernel is preferred if it takes less than this share of the default kernel's time
_MAX_FAILED_STARTS = 2  # the trial ends after this many successive processes that ended before trying a kernel


@dataclass(frozen=True)
class TriedKernel:
    """The result of trying a kernel.

    Attributes:
        kernel, place: the kernel, and the operation that it computed (`kernel_choice.py`).
        dropped: whether the network had dropout.
        error: largest relative error of a parameter's gradient; None if the kernel failed.
        bound: largest allowed error.
        comparable: whether the kernel's random draws equal those of `written`; draws of a GPU's generator do not.
        seconds: time of a forward and a backward pass on rows of the run's shape; None if it was not timed.
        failure: why the kernel failed; empty if it did not.
    """

    kernel: Kernel
    dropped: bool
    error: float | None
    bound: float
    comparable: bool = True
    seconds: float | None = None
    failure: str = ""
    place: Place = "attention"

    @property
    def is_right(self) -> bool:
        """Whether the kernel's results are correct or, if they cannot be compared, whether it did not fail."""
        return not self.failure and (not self.comparable or (self.error is not None and self.error <= self.bound))


@dataclass(frozen=True)
class KernelTrial:
    """The results of a trial, in the order in which layers list the kernels. `ended`: why the trial was not completed;
    empty if it was.
    """

    tried: tuple[TriedKernel, ...]
    ended: str = ""


@dataclass(frozen=True)
class Limits:
    """Time limits in seconds: for the start of a process and between kernels, for each kernel, for the whole trial."""

    start: float = 300.0
    kernel: float = 300.0
    whole: float = 900.0


class TrialUnit(NamedTuple):
    """What is tried at a time: a kernel at a place of network number `network`, with dropout or without."""

    network: int
    dropped: bool
    place: Place
    kernel: Kernel


Candidate = tuple[Place, Kernel]  # a kernel, and the operation for which it is tried


def try_kernels(
    subject: TrialSubject,
    *,
    timed: bool,
    limits: Limits | None = None,
    tick: Callable[[], None] = lambda: None,
) -> KernelTrial:
    """Try every kernel that supports the subject's tensors, without dropout and, if the network has dropout, with it.

    A kernel's failure is returned in its result, never raised.

    Args:
        timed: whether correct kernels are timed.
        limits: time limits; None: the defaults.
        tick: called about twice a second.
    """
    progress = _Progress(subject, timed, limits or Limits())
    while progress.goes_on:
        request = progress.next_request()
        with closing(run_trial_process(TRIAL_FUNCTION, request, progress.deadline, tick)) as reports:
            try:
                progress.take_reports(reports)
            except TrialEnded as ended:
                progress.process_ended(str(ended))
    return KernelTrial(tuple(merge_networks(progress.found)), progress.ended)


@dataclass
class _Progress:
    """The progress of a trial, which starts a new process whenever one fails.

    Attributes:
        found: results by unit.
        out: kernels that are no longer tried, with the reason.
        again: units during which a process ended that had already tried others. As these may be the cause, such a unit
            is tried once more, as the first of a new process, if there is time.
        current: the unit that is being tried, and the largest allowed error.
    """

    subject: TrialSubject
    timed: bool
    limits: Limits
    found: dict[TrialUnit, TriedKernel] = field(default_factory=dict)
    out: dict[Candidate, str] = field(default_factory=dict)
    again: set[TrialUnit] = field(default_factory=set)
    current: tuple[TrialUnit, float] | None = None
    goes_on: bool = True
    ended: str = ""

    def __post_init__(self) -> None:
        self._end = time.monotonic() + self.limits.whole
        self.deadline = Deadline(0.0)
        self._tried_here = self._idle_starts = 0  # kernels tried by this process; starts in a row that tried none

    def next_request(self) -> Report:
        self.current, self._tried_here = None, 0
        self._set_deadline(self.limits.start)
        return {
            "subject": self.subject.to_json(),
            "settings": torch_settings(),
            "timed": self.timed,
            "done": list(self.found),
            "skipped": [[*candidate, why] for candidate, why in self.out.items()],
        }

    def take_reports(self, reports: Iterator[Report]) -> None:
        """Record reports until the process has tried all kernels, or a kernel has damaged the process."""
        for report in reports:
            unit = TrialUnit(*report["unit"])
            candidate = (unit.place, unit.kernel)
            if "bound" in report:
                self.current, self._idle_starts = (unit, report["bound"]), 0
                self._set_deadline(self.limits.kernel)
                continue
            self._tried_here += self.current is not None
            self.found[unit], self.current = TriedKernel(**report["found"]), None
            self._set_deadline(self.limits.start)
            if report["harmed"]:
                self.out[candidate] = self.found[unit].failure
                return
        self.goes_on = False

    def process_ended(self, how: str) -> None:
        """Decide whether to start another process, and what it tries, after one has ended too early (`how`: why)."""
        over = time.monotonic() >= self._end
        if self.current is None:
            self._idle_starts += 1
        elif self._tried_here and self.current[0] not in self.again and not over:
            self.again.add(self.current[0])
        else:
            self._note_crash(*self.current, how)
        if over:
            self.goes_on, self.ended = False, f"it had taken {self.limits.whole:.0f} s: {how}"
        elif self._idle_starts >= _MAX_FAILED_STARTS:
            self.goes_on, self.ended = False, how

    def _note_crash(self, unit: TrialUnit, bound: float, how: str) -> None:
        self.out[unit.place, unit.kernel] = how
        self.found[unit] = TriedKernel(
            unit.kernel, unit.dropped, None, bound, failure=how[:MAX_ERROR_CHARACTERS], place=unit.place
        )

    def _set_deadline(self, seconds: float) -> None:
        self.deadline.seconds = max(0.0, min(seconds, self._end - time.monotonic()))


def merge_networks(found: Mapping[TrialUnit, TriedKernel]) -> list[TriedKernel]:
    """Merge each kernel's results for an objective's networks into one: a failure if there is one, else the result with
    the largest error. Seconds are added up.
    """
    several: dict[tuple[bool, Place, Kernel], list[TriedKernel]] = {}
    for unit, tried in found.items():
        several.setdefault((unit.dropped, unit.place, unit.kernel), []).append(tried)
    return [_worst_result(ones) for ones in several.values()]


def _worst_result(several: Sequence[TriedKernel]) -> TriedKernel:
    worst = max(several, key=lambda one: (bool(one.failure), (one.error or 0.0) / one.bound))
    seconds = [one.seconds for one in several]
    whole = None if any(each is None for each in seconds) else sum(each or 0.0 for each in seconds)
    return replace(worst, seconds=whole)


def build_preference(tried: Sequence[TriedKernel]) -> Preference:
    """Return the correct kernels in order of preference: kernels whose draws are hashed from tokens come first, and a
    clearly faster kernel comes before the default one.

    `written` comes last, unless nothing was tried.
    """
    mine = [one for one in tried if one.place == "attention"]
    plain, dropped = _rank_kernels(mine, False), _rank_kernels(mine, True)
    places: dict[Place, None] = dict.fromkeys(one.place for one in tried if one.place != "attention")
    elsewhere = {place: _right_kernels([one for one in tried if one.place == place]) for place in places}
    return Preference(plain, dropped or plain, elsewhere)


def _rank_kernels(tried: Sequence[TriedKernel], dropped: bool) -> tuple[Kernel, ...]:
    """Return the correct attention kernels in order of preference. A kernel whose dropout cannot be compared counts as
    correct only if it is correct without dropout.
    """
    plain = {one.kernel for one in tried if not one.dropped and one.is_right}
    mine = [one for one in tried if one.dropped == dropped and one.is_right]
    mine = [one for one in mine if one.comparable or one.kernel in plain]
    mine.sort(key=lambda one: (one.kernel == "written", not one.comparable))
    quick = min(
        (one for one in mine if one.comparable and one.seconds is not None),
        key=lambda one: one.seconds or 0.0,
        default=None,
    )
    usual = mine[0].seconds if mine else None
    if quick is not None and usual is not None and (quick.seconds or 0.0) < _QUICKER_SHARE * usual:
        mine.remove(quick)
        mine.insert(0, quick)
    last: list[Kernel] = ["written"] if any(one.dropped == dropped for one in tried) else []
    return tuple(dict.fromkeys([*(one.kernel for one in mine), *last]))


def _right_kernels(tried: Sequence[TriedKernel]) -> tuple[Kernel, ...]:
    """Return the kernels of a place that were correct in all trials, with and without dropout, in order."""
    wrong = {one.kernel for one in tried if not one.is_right}
    dropped = any(one.dropped for one in tried)
    return tuple(kernel for kernel in _rank_kernels(tried, dropped) if kernel not in wrong or kernel == "written")
