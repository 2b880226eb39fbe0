"""One start of a run, watched by its operator, with how it ended on record."""

import time

from rich.console import Console

from launcher.metrics import operator_event
from launcher.progress import Watch
from launcher.runs import Run
from launcher.supervisor import Outcome, train


def operate(run: Run, console: Console) -> Outcome:
    """Train until the run is complete or asked to stop, showing progress; the end is recorded as an event.

    An end without an event was no orderly one: the report says so. Raises as `launcher.supervisor.train`.
    """
    watch = Watch(console, run.recipe.total_steps)
    try:
        outcome = train(run, watch)
    finally:
        watch.close()
    kind = "stop" if outcome.code else "end"
    operator_event(run.store, kind, time.time(), step=outcome.step)
    return outcome
