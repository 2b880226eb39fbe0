"""Errors that a user can act on: each says what is wrong, where, and what to do."""

import re


class UserError(Exception):
    """A mistake in the user's input. The CLI prints it without a traceback and exits with a code other than 0.

    Attributes:
        problem: what is wrong, with the path and the value.
        remedy: the next thing to try.
    """

    def __init__(self, problem: str, *, remedy: str) -> None:
        super().__init__(problem, remedy)
        self.problem = problem
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.problem}\n  remedy: {self.remedy}"

    def __reduce__(self) -> tuple[object, ...]:  # makes the error picklable on its way from a Ray worker
        return (_rebuild_error, (type(self), self.problem, self.remedy))


def _rebuild_error(kind: type[UserError], problem: str, remedy: str) -> UserError:
    return kind(problem, remedy=remedy)


class ModelError(UserError):
    """A model cannot be built or loaded as requested."""


class TrainingError(UserError):
    """A training setting cannot work, or a run cannot continue."""


class LibraryChanged(UserError):
    """A library lacks a private name that we use, or it behaves differently in the installed version."""


def library_changed(library: str, what: str) -> LibraryChanged:
    """Return the error for a private name `what` of `library` that is missing or behaves differently.

    The message has the installed version, and the tested versions from our package metadata.
    """
    from importlib.metadata import PackageNotFoundError, requires, version  # slow, and rarely needed

    try:
        seen = version(library)
        tested = [r for r in requires("maskfleet") or () if re.match(rf"{library}\b(?!-)", r) and ";" not in r]
    except PackageNotFoundError:
        seen, tested = "of an unknown version", []
    return LibraryChanged(
        f"{library} {seen}: {what} is missing or has changed; tested: {', '.join(tested) or 'see pyproject.toml'}",
        remedy="install the versions that were tested: pip install -c infra/constraints.txt .",
    )
