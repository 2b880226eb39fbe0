"""Optional packages: they are not installed with Maskfleet, and only some commands need them. Also their error messages
about files."""

from importlib import import_module
from types import ModuleType

from launcher.errors import MissingPackage

EVALUATE = "evaluate"  # the extra with all that fine-tuning, evaluation and embeddings need


def optional(package: str, use: str, extra: str | None = None) -> ModuleType:
    """Return the package, imported. Raises MissingPackage, which says that `use` needs it, and how to install it: by
    itself, or with the other packages of an extra of ours."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name not in (
            package,
            package.partition(".")[0],
        ):  # it is there, and something that it needs is not
            raise
        problem = f"{use} needs {package}, which is not installed"
        wanted = package if extra is None else f"'maskfleet[{extra}]'"
        raise MissingPackage(problem, remedy=f"pip install {wanted}") from error


def reason(error: Exception) -> str:
    """Return why a foreign library cannot read a file, in one line. For a damaged file it may raise anything:
    `KeyError: 'added_tokens'`, or a bare `Exception`."""
    said = next(iter(str(error).splitlines()), "")
    telling = isinstance(error, OSError | ValueError) or type(error) is Exception
    return said if telling and said else f"{type(error).__name__}: {said}".rstrip(": ")
