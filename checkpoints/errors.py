"""What can be wrong with checkpoints, and with who may write them."""

from encoder_core.errors import UserError


class CheckpointError(UserError):
    """A checkpoint that cannot be written or used as asked."""


class DamagedCheckpoint(CheckpointError):
    """Stored bytes that are missing, cut short, or not the ones the manifest promises."""


class NoGoodCheckpoint(CheckpointError):
    """The run has checkpoints, and none of them can be loaded."""


class RunIsActive(CheckpointError):
    """Another start of this run is alive."""


class Superseded(CheckpointError):
    """A newer start of this run has taken over; this one may not write any more."""
