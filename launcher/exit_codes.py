"""The exit codes and time limits on which a scheduler or script that repeats `maskfleet train` may rely.

Every end of the command is one of four codes. Templates, schedulers and scripts rely on these numbers.
"""

from checkpoints.errors import Superseded
from data_service.errors import RayLost
from data_service.errors import UserError as DataError
from data_service.store.errors import RETRYABLE_ERRORS
from encoder_core.errors import UserError as ModelError
from launcher.errors import TransientRunError

FINISHED = 0  # the command did what was asked
MISTAKE = 2  # a user's mistake, or a failure that recurred after restarts
STOPPED = 3  # the operator stopped the run: schedulers must not start it again
REPEAT = 75  # any other end: the same command, run again, continues
EXIT_CODES = (FINISHED, MISTAKE, STOPPED, REPEAT)

SAVE_SECONDS = 120  # seconds that a scheduler must leave between the request to stop and the kill, for a checkpoint
JOIN_SECONDS = 900  # time limit for all nodes of a job to join its Ray cluster; images may have to be pulled

_RETRYABLE_ERRORS = (*RETRYABLE_ERRORS, Superseded, TransientRunError, RayLost)  # errors that may pass by themselves


def exit_code_for(error: BaseException) -> int:
    """Return the exit code of a command that raised `error`: `MISTAKE` if repeating it cannot help, else `REPEAT`."""
    if isinstance(error, DataError | ModelError) and not isinstance(error, _RETRYABLE_ERRORS):
        return MISTAKE
    return REPEAT
