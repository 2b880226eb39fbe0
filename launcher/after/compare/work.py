"""Everything of a comparison that is not there yet: runs, and what is measured of them."""

from collections.abc import Iterator
from threading import Event

from launcher.after.compare.measure import common_rows, ensure_measured
from launcher.after.compare.place import Comparison
from launcher.after.compare.training import Wanted, created, ensure_trained, is_complete, wanted
from launcher.errors import CompareError
from launcher.progress import work
from launcher.runtime.run.record import Run


class Work:
    """Started again, it goes on where it was: all that is done lies in the comparison's store.

    Attributes:
        failures: why a run is not complete or not measured, by its name, for people.
    """

    def __init__(self, comparison: Comparison, interrupted: Event) -> None:
        self._comparison, self._interrupted = comparison, interrupted
        self.failures: dict[str, str] = {}

    def done(self) -> Iterator[str]:
        """Do it; yields a line for people before each part that takes long.

        Raises:
            KeyboardInterrupt: an interrupt was asked for; a run that trained has committed a checkpoint.
            CompareError: a run is there with another recipe or budget. Before anything is trained.
            CorpusError, RecipeError, StoreError, ...: as `init`. TryAgain: a run does not get on.
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

    def _trained(self, which: Wanted, run: Run) -> bool:
        try:
            ensure_trained(run, self._interrupted)
        except CompareError as error:
            self.failures[str(which)] = error.problem
            return False
        return True
