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
    """A task that cannot be read or measured: its description, its files, or what is in them."""


class RunError(UserError):
    """A run that does not exist, exists already, or is not what its URI suggests."""


class TryAgain(RunError):
    """What is in the way may pass by itself: the same command, given again, may succeed."""


class RunChanged(RunError):
    """The recipe, the corpus or the tokenizer is no longer what the run was started with."""


class CompareError(UserError):
    """Recipes whose figures would not mean the same, or a comparison that is not there or cannot go on."""


class EstimateError(UserError):
    """A capacity that cannot be estimated: no such GPU, no machines, or settings that contradict each other."""


class OutputError(UserError):
    """A local file, or standard output, that cannot be written."""


class OptionError(UserError):
    """Values of a command's options that cannot be."""


class LaunchError(UserError):
    """A launch that cannot work as asked, or that the scheduler refused."""


class MissingPackage(UserError):
    """A package that is not installed with Maskfleet, and that what was asked for needs."""


class BurninError(UserError):
    """A burn-in that cannot begin, or a check that does not exist."""
