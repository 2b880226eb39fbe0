"""Errors of checkpoints, and of attempts that may not write them."""

from data_service.store.errors import StoreUnavailable
from encoder_core.errors import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be written or used as asked."""


class ExportError(CheckpointError):
    """A folder that holds something other than an earlier export, so no export may be written there."""


class DamagedCheckpoint(CheckpointError):
    """Stored bytes that are missing, truncated, or different from what the manifest describes."""


class NewerFormat(CheckpointError):
    """An intact file of a run that a newer version of Maskfleet has written. This version must not replace it."""


class NoGoodCheckpoint(CheckpointError):
    """A run that has checkpoints, none of which can be loaded."""


class RunIsActive(CheckpointError):
    """A run that another attempt is training, or may be training."""


class Superseded(CheckpointError):
    """An attempt that may no longer write, because a newer attempt of the run has been claimed."""


class SaveFailed(StoreUnavailable):
    """The failure of a run's final save because its store did not answer. The run can continue from `last` later.

    Attributes:
        step: step that was to be saved.
        last: step of the newest checkpoint, from which the run continues; 0 if there is none.
    """

    def __init__(self, step: int, last: int, reason: str) -> None:
        super().__init__(
            f"the final checkpoint, of step {step:,}, could not be saved, so the work since step {last:,} is lost: "
            f"{reason}",
            remedy="run the same command again once the store answers: it continues from the last checkpoint",
        )
        self.step, self.last = step, last
