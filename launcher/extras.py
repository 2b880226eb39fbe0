"""Packages that only some of Maskfleet's uses need, and that are not installed with it."""

from importlib import import_module
from types import ModuleType

from launcher.errors import MissingPackage

EVALUATE = "evaluate"  # the extra with all that fine-tuning, evaluation and embeddings need


def optional(package: str, use: str, extra: str | None = None) -> ModuleType:
    """The package, imported. Raises MissingPackage, which says that `use` needs it, and how to install it: by itself,
    or with the other packages of an extra of ours."""
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
