"""One start of a run: shows it to the operator, and records how it ended.

Whatever was raised, the command ends with one of the exit codes of `launcher.exit_codes`. A run ends for good only
because of a wrong input, or because of a failure that restarts have not cured.
"""

import traceback
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

from rich.console import Console

from checkpoints.errors import RunIsActive, Superseded
from checkpoints.listing import list_committed
from data_service.errors import UserError as DataError
from data_service.store.errors import StoreError
from encoder_core.errors import UserError as ModelError
from launcher.command import screen
from launcher.exit_codes import FINISHED, MISTAKE, REPEAT, code_of
from launcher.runtime.cluster.display import Watch
from launcher.runtime.cluster.operator_log import OperatorLog
from launcher.runtime.cluster.stop_requests import StopRequests
from launcher.runtime.cluster.supervisor import Companions, RunOutcome, supervise
from launcher.runtime.run.record import Run

_REASON_CHARACTERS = 2000  # characters of a reason on record
_RECORD_S = 10.0  # time limit for writing the last record


def train(run: Run, console: Console, companions: Companions, nodes: int = 1) -> RunOutcome:
    """Train until the run is complete or asked to stop, and show progress. The end is recorded as an event.

    Training begins when the cluster has `nodes` nodes. A start without an event of its end was killed; the report says
    so.

    Raises subclasses of UserError only for mistakes, which have exit code 2; every other end is an outcome.
    """
    watch = Watch(console, run.recipe.total_steps)
    with (
        _own_screen(console),
        closing(watch),
        companions.publishing(run, watch.note),
    ):
        log = OperatorLog(run.store, watch.note)
        try:
            return _train(run, watch, log, companions=companions, nodes=nodes)
        finally:
            log.close(_RECORD_S)


@contextmanager
def _own_screen(console: Console) -> Iterator[None]:
    """Give `console` a separate stream inside the `with` block, so that neither libraries nor a closed terminal disturb
    it."""
    before, console.file = console.file, screen()
    try:
        yield
    finally:
        console.file = before


def _train(run: Run, watch: Watch, log: OperatorLog, *, companions: Companions, nodes: int) -> RunOutcome:
    with StopRequests(watch.note) as stopping:
        try:
            outcome = supervise(run, watch, log, stopping, companions=companions, nodes=nodes)
        except KeyboardInterrupt:
            watch.note("ended at once, without saving: what was done since the last checkpoint is lost")
            return RunOutcome(REPEAT, 0, stopping.reason)
        except (DataError, ModelError) as error:
            return _record_user_error(run, error, watch, log)
        except Exception as error:
            return _record_bug(run, error, watch, log)
    reason = {"reason": outcome.reason} if outcome.reason else {}
    log.event("end" if outcome.code == FINISHED else "stop", step=outcome.step, **reason)
    return outcome


def _resume_advice(run: Run) -> str:
    """Return, as text for the operator, what the same command will do if it is given again."""
    with suppress(StoreError):
        if not list_committed(run.store):
            return "the same command starts it again from the beginning: it has no checkpoint yet"
    return "the same command continues from the last checkpoint"


def _record_user_error(run: Run, error: DataError | ModelError, watch: Watch, log: OperatorLog) -> RunOutcome:
    """Record and show an error that is meant for users. An error because another start took the run over is no failure
    and is not recorded."""
    if not isinstance(error, RunIsActive | Superseded):
        log.event("failed", reason=error.problem[:_REASON_CHARACTERS])
    if code_of(error) == MISTAKE:
        raise error
    watch.note(f"{error.problem}\n  {error.remedy}")
    watch.note(_resume_advice(run))
    return RunOutcome(REPEAT, 0)


def _record_bug(run: Run, error: Exception, watch: Watch, log: OperatorLog) -> RunOutcome:
    """Record and show an unexpected error of Ray or of our own code. The operator sees one line; the event holds the
    traceback."""
    line = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    log.event(
        "failed",
        reason=line[:_REASON_CHARACTERS],
        trace="".join(traceback.format_exception(error))[-_REASON_CHARACTERS:],
    )
    watch.note(f"the driver failed: {line[:300]}")
    watch.note(_resume_advice(run))
    return RunOutcome(REPEAT, 0)
