"""Packages that only some of Maskfleet's uses need, and that are not installed with it."""

from importlib import import_module
from types import ModuleType

from launcher.errors import MissingPackage


def optional(package: str, use: str) -> ModuleType:
    """The package, imported. Raises MissingPackage, which says that `use` needs it."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if error.name != package:  # it is there, and something that it needs is not
            raise
        problem = f"{use} needs {package}, which is not installed"
        raise MissingPackage(problem, remedy=f"pip install {package}") from error
