"""Runs of a comparison, one after another, each trained by `maskfleet train` in a process of its own."""

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from threading import Event

from checkpoints.listing import committed
from data_service.visible import shell_word
from launcher.after.compare.place import Comparison
from launcher.after.tasks.measurable import check_tasks
from launcher.errors import CompareError, RunChanged, TryAgain
from launcher.runtime.cluster.ending import Ending, train
from launcher.runtime.run.create import create_run, reconcile
from launcher.runtime.run.record import Run

_TRIES, _PAUSE_S = 5, 20.0  # starts in a row that bring no new checkpoint; between two starts


@dataclass(frozen=True)
class Wanted:
    """A run of the comparison: its arm's label and its seed."""

    label: str
    seed: int

    def __str__(self) -> str:
        return f"{self.label}-{self.seed}"


def wanted(comparison: Comparison) -> Iterator[Wanted]:
    """All arms with the first seed, then with the next, so that there is something to compare early."""
    return (Wanted(arm.label, seed) for seed in comparison.seeds for arm in comparison.arms)


def is_complete(run: Run) -> bool:
    """Whether its last step is committed. Raises StoreError."""
    marks = committed(run.store)
    return bool(marks) and marks[0].step >= run.recipe.total_steps


def created(comparison: Comparison, which: Wanted) -> Run:
    """The run, made if it is not there yet.

    Raises CompareError: it is there with another recipe; RunError, StoreError and as `init`.
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
    """Train it to its end, or on from where it is; started again while it gets on.

    Raises:
        KeyboardInterrupt: `interrupted` was set; a checkpoint is committed by then, or the run complete.
        CompareError: it cannot be trained, or somebody stopped it. TryAgain: it ends again and again where it was.
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
