"""What can be wrong with checkpoints, and with who may write them."""

from data_service.store.errors import StoreUnavailable
from encoder_core.errors import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be written or used as asked."""


class ExportError(CheckpointError):
    """A folder that holds something else than a former export, so that no export may be written there."""


class DamagedCheckpoint(CheckpointError):
    """Stored bytes that are missing, cut short, or not the ones the manifest promises."""


class NewerFormat(CheckpointError):
    """Something of a run that a newer version of Maskfleet has written. It is good, so nothing takes its place."""


class NoGoodCheckpoint(CheckpointError):
    """The run has checkpoints, and none of them can be loaded."""


class RunIsActive(CheckpointError):
    """Another attempt of this run is alive."""


class Superseded(CheckpointError):
    """A newer attempt of this run has taken over; this one may not write any more."""


class SaveFailed(StoreUnavailable):
    """The last save of a run did not reach its store. The store may come back, and the run then goes on from `last`.

    Attributes:
        step: the step that was to be saved.
        last: the step of the newest checkpoint, from which the run goes on; 0 if there is none.
    """

    def __init__(self, step: int, last: int, reason: str) -> None:
        super().__init__(
            f"the final checkpoint of step {step:,} failed, and the work since step {last:,} is lost: {reason}",
            remedy="run the same command again once the store answers: it goes on from the last commit",
        )
        self.step, self.last = step, last
