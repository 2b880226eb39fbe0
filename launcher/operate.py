"""One start of a run, watched by its operator, with how it ended on record."""

import time
from contextlib import closing, suppress

from rich.console import Console

from checkpoints.errors import RunIsActive, Superseded
from data_service.errors import UserError as DataError
from data_service.store.errors import StoreError
from encoder_core.errors import UserError as ModelError
from launcher.metrics import operator_event
from launcher.progress import Watch
from launcher.runs import Run
from launcher.supervisor import Outcome, train
from launcher.webhook import announcing

_LONGEST = 2000  # characters of a reason on record


def operate(run: Run, console: Console, nodes: int = 1) -> Outcome:
    """Train until the run is complete or asked to stop, showing progress; the end is recorded as an event.

    Begins when the cluster has `nodes` nodes. An end without an event was no orderly one: the report says so. Raises
    as `launcher.supervisor.train`.
    """
    watch = Watch(console, run.recipe.total_steps)
    about = {"run": run.uri, "name": run.recipe.name}
    with closing(watch), announcing(run.store, run.recipe.events, about, watch.note):
        try:
            outcome = train(run, watch, nodes)
        except (DataError, ModelError) as error:
            _record_failure(run, error)
            raise
        kind = "stop" if outcome.code else "end"
        reason = {"reason": outcome.reason} if outcome.reason else {}
        operator_event(run.store, kind, time.time(), step=outcome.step, **reason)
    return outcome


def _record_failure(run: Run, error: DataError | ModelError) -> None:
    """Why the run ended. Where another start of it runs, nothing did; a store that fails cannot be told."""
    if isinstance(error, RunIsActive | Superseded):
        return
    with suppress(StoreError):
        operator_event(run.store, "failed", time.time(), reason=error.problem[:_LONGEST])
