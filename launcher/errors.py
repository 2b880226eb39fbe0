"""The launcher's own user errors: recipes that cannot work, runs that are not there or have changed.

Also the import of optional packages, which are not installed with Maskfleet and only some commands need.
"""

from importlib import import_module
from types import ModuleType

from data_service.errors import UserError

EVALUATE_EXTRA = "evaluate"  # the extra with all that fine-tuning, evaluation and embeddings need

PEER_GONE_MESSAGES = (
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


class TransientRunError(RunError):
    """An obstacle that may pass by itself: the same command, given again, may succeed."""


class RunChanged(RunError):
    """A recipe, a corpus or a tokenizer that has changed since the run was started."""


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


def import_optional(package: str, purpose: str, extra: str | None = None) -> ModuleType:
    """Return the package, imported. Raises MissingPackage, which says that `purpose` needs it, and how to install it:
    by itself, or with the other packages of an extra of ours."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        # The package is installed, but one of its dependencies is missing.
        if error.name not in (
            package,
            package.partition(".")[0],
        ):
            raise
        problem = f"{purpose} needs {package}, which is not installed"
        wanted = package if extra is None else f"'maskfleet[{extra}]'"
        raise MissingPackage(problem, remedy=f"pip install {wanted}") from error


def describe_error(error: Exception) -> str:
    """Return why a foreign library cannot read a file, in one line. For a damaged file it may raise anything:
    `KeyError: 'added_tokens'`, or a bare `Exception`."""
    said = next(iter(str(error).splitlines()), "")
    telling = isinstance(error, OSError | ValueError) or type(error) is Exception
    return said if telling and said else f"{type(error).__name__}: {said}".rstrip(": ")
