"""Completes a comparison: trains its missing runs one after another, each by `maskfleet train` in its own process, and
then measures them."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Event

from checkpoints.listing import committed
from data_service.printable import shell_word
from launcher.after.compare.measure import common_rows, ensure_measured
from launcher.after.compare.place import Comparison
from launcher.after.tasks.measurable import check_tasks
from launcher.errors import CompareError, RunChanged, TryAgain
from launcher.progress import work
from launcher.runtime.cluster.ending import Ending, train
from launcher.runtime.run.create import create_run, reconcile
from launcher.runtime.run.record import Run

_TRIES, _PAUSE_S = 5, 20.0  # starts in a row that bring no new checkpoint; between two starts


@dataclass(frozen=True)
class ArmRun:
    """A run of the comparison: its arm's label and its seed."""

    label: str
    seed: int

    def __str__(self) -> str:
        return f"{self.label}-{self.seed}"


def wanted(comparison: Comparison) -> Iterator[ArmRun]:
    """Return all arms with the first seed, then with the next, so that there is something to compare early."""
    return (ArmRun(arm.label, seed) for seed in comparison.seeds for arm in comparison.arms)


def is_complete(run: Run) -> bool:
    """Return whether its last step is committed. Raises StoreError."""
    marks = committed(run.store)
    return bool(marks) and marks[0].step >= run.recipe.total_steps


def created(comparison: Comparison, which: ArmRun) -> Run:
    """Return the run, and create it if it does not exist.

    Raises CompareError if the run exists with another recipe; RunError, StoreError, and the errors of `init`.
    """
    arm = next(arm for arm in comparison.arms if arm.label == which.label)
    run, recipe, now = comparison.run(which.label, which.seed), arm.seeded(which.seed), datetime.now(UTC)
    if run is None or run.recipe.evaluation.tasks != recipe.evaluation.tasks:
        check_tasks(recipe.evaluation.tasks)
    if run is None:
        return create_run(recipe, comparison.uri(which.label, which.seed), now)
    try:
        return reconcile(run, recipe=recipe, accept_changes=False, now=now)
    except RunChanged as error:
        raise CompareError(
            error.problem, remedy="ask for what was asked for there, or give another --out"
        ) from error


def ensure_trained(run: Run, interrupted: Event) -> None:
    """Train the run from its newest checkpoint to its end. If training ends early, start it again as long as it makes
    progress.

    Raises:
        KeyboardInterrupt: if `interrupted` was set; a checkpoint has been committed, or the run is complete.
        CompareError: if the run cannot be trained, or somebody stopped it.
        TryAgain: if training ends again and again without progress.
    """
    step, left = -1, _TRIES
    while left and not is_complete(run):
        ending = train(run.uri, show=False)
        if interrupted.is_set() or (ending.how == "again" and interrupted.wait(_PAUSE_S)):
            raise KeyboardInterrupt  # also of a run that had no step left to stop before: others would begin
        if ending.how in ("mistake", "stopped"):
            raise _refused(run, ending)
        left = _TRIES if ending.step > step else left - 1
        step = ending.step
    if not is_complete(run):
        raise TryAgain(f"{run.uri} does not get past step {step:,}", remedy="give the same command again")


def _refused(run: Run, ending: Ending) -> CompareError:
    said = ending.said.strip().splitlines()[-2:]
    what = "was stopped by `maskfleet runs stop`" if ending.how == "stopped" else "cannot be trained"
    return CompareError(
        f"{run.uri} {what} at step {ending.step:,}: {' '.join(said)}",
        remedy=f"maskfleet train {shell_word(run.uri)} tells more; then give the same command again",
    )


class Work:
    """The work of a comparison. It resumes when it is started again, because the comparison's store holds all results.

    Attributes:
        failures: why a run is not complete or not measured, by the run's name, for the user.
    """

    def __init__(self, comparison: Comparison, interrupted: Event) -> None:
        self._comparison, self._interrupted = comparison, interrupted
        self.failures: dict[str, str] = {}

    def done(self) -> Iterator[str]:
        """Train and measure all runs. Yield a line for the user before each part that takes long.

        Raises:
            KeyboardInterrupt: if an interrupt was requested; a run that trained has committed a checkpoint.
            CompareError: if a run exists with another recipe or budget. This is checked before any training.
            CorpusError, RecipeError, StoreError, ...: as `init`.
            TryAgain: if a run makes no progress.
        """
        self._comparison.keep()
        every = [(which, created(self._comparison, which)) for which in wanted(self._comparison)]
        rows = common_rows(every[0][1])
        for number, (which, run) in enumerate(every, 1):
            if not is_complete(run):
                yield f"{number} of {len(every)}: training {which} ({run.recipe.total_steps:,} steps)"
            of = f"{which}, run {number} of {len(every)}"
            with work(f"training {of}"):
                trained = self._trained(which, run)
            if trained:
                with work(f"measuring {of}"):
                    trouble = ensure_measured(run, rows, run.recipe.evaluation.tasks, self._comparison.store)
                if trouble:
                    self.failures[str(which)] = "; ".join(trouble)

    def _trained(self, which: ArmRun, run: Run) -> bool:
        try:
            ensure_trained(run, self._interrupted)
        except CompareError as error:
            self.failures[str(which)] = error.problem
            return False
        return True
