"""The launcher's own user errors: recipes that cannot work, runs that do not exist or have changed.

Also imports optional packages, which are not installed with Maskfleet and only some commands need.
"""

from importlib import import_module
from types import ModuleType

from data_service.errors import UserError

EVALUATE_EXTRA = "evaluate"  # the pip extra with all packages for fine-tuning, evaluation and embeddings

PEER_GONE_MESSAGES = (
    "gloo/transport",
    "Connection closed by peer",
    "ncclRemoteError",
    "NCCL communicator was aborted",
)
"""Parts of torch.distributed's error messages on a rank after another rank has died."""


class RecipeError(UserError):
    """A recipe that cannot be read, or that asks for an impossible combination."""


class TaskError(UserError):
    """A task that cannot be read or measured, because of its description, its files or their content."""


class RunError(UserError):
    """A run that does not exist, exists already, or is not what its URI suggests."""


class TransientRunError(RunError):
    """A problem that may pass by itself: running the same command again may succeed."""


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
    """Import and return a package. Raises MissingPackage, which says that `purpose` needs it, and how to install it:
    alone, or with the other packages of Maskfleet's `extra`."""
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
    """Return, in one line, why a foreign library cannot read a file. For damaged files, libraries raise anything, such
    as `KeyError: 'added_tokens'` or a bare `Exception`."""
    said = next(iter(str(error).splitlines()), "")
    telling = isinstance(error, OSError | ValueError) or type(error) is Exception
    return said if telling and said else f"{type(error).__name__}: {said}".rstrip(": ")
