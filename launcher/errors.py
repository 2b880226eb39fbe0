"""The launcher's own user errors: recipes that cannot work, runs that are not there or have changed."""

from data_service.errors import UserError

PEER_GONE = (
    "gloo/transport",
    "Connection closed by peer",
    "ncclRemoteError",
    "NCCL communicator was aborted",
)
"""Parts of what torch.distributed says on a rank because another rank has died."""


class RecipeError(UserError):
    """A recipe that cannot be read, or that asks for an impossible combination."""


class TaskError(UserError):
    """A task that cannot be read or measured, because of its description, its files or their content."""


class RunError(UserError):
    """A run that does not exist, exists already, or is not what its URI suggests."""


class TryAgain(RunError):
    """An obstacle that may pass by itself: the same command, given again, may succeed."""


class RunChanged(RunError):
    """A recipe, a corpus or a tokenizer that has changed since the run was started."""


class CompareError(UserError):
    """Recipes whose figures are not comparable, or a comparison that does not exist or cannot continue."""


class EstimateError(UserError):
    """A capacity that cannot be estimated: no such GPU, no machines, or settings that contradict each other."""


class OutputError(UserError):
    """A local file, or standard output, that cannot be written."""


class OptionError(UserError):
    """Values of a command's options that are not allowed."""


class LaunchError(UserError):
    """A launch that cannot work as asked, or that the scheduler refused."""


class MissingPackage(UserError):
    """A package that the request needs and that is not installed with Maskfleet."""


class CertificateError(UserError):
    """A certificate of a run that cannot be read, trusted or written."""


class BurninError(UserError):
    """A burn-in that cannot begin, or a check that does not exist."""
