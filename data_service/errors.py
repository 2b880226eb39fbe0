"""Errors that a user can act on: each says what is wrong, where, and what to do."""

import re

from data_service.printable import mask_secrets


class UserError(Exception):
    """An error that the user can correct. The CLI prints it without a traceback and exits non-zero.

    `problem` names the path and the value; `remedy` is the next thing to try. Secret keys in URIs are removed from
    both, because errors are logged and recorded in many places.
    """

    def __init__(self, problem: str, *, remedy: str) -> None:
        self.problem, self.remedy = mask_secrets(problem), mask_secrets(remedy)
        super().__init__(self.problem, self.remedy)

    def __str__(self) -> str:
        return f"{self.problem}\n  remedy: {self.remedy}"

    def __reduce__(self) -> tuple[object, ...]:  # makes the error picklable on its way from a Ray worker
        return (_rebuild, (type(self), self.problem, self.remedy))


def _rebuild(kind: type[UserError], problem: str, remedy: str) -> UserError:
    return kind(problem, remedy=remedy)


class InputError(UserError):
    """Raw text that cannot be read as requested: it is missing, empty or undecodable."""


class CorpusError(UserError):
    """A built corpus that cannot be used as requested: it is absent, too small, or does not match."""


def damaged_corpus(place: str, reason: str) -> CorpusError:
    """Return the error for a corpus file at `place` whose content has changed since it was written."""
    return CorpusError(
        f"{place} is damaged: {reason}", remedy="restore the file from a copy, or build the corpus again"
    )


class PrepareError(UserError):
    """Documents that cannot be prepared: a setting is wrong, a file or package is missing, or no document is left."""


class RayLost(UserError):
    """A Ray cluster that did not start, or that ended while it was used. Running the command again may succeed."""


class EnvironmentUnusable(UserError):
    """An environment variable or a process limit with which the command cannot work."""


class CorruptBlock(CorpusError):
    """A stored block of a corpus whose bytes do not match the manifest's hash, or are not a block."""


class TokenizerError(UserError):
    """A tokenizer that cannot be trained or loaded as requested."""


class PlanError(UserError):
    """A data plan that cannot be made from this corpus and these settings."""


class BuildFailed(UserError):
    """Samples that could not be built: the Ray tasks building them died repeatedly, most likely for lack of memory."""


class LibraryChanged(UserError):
    """A library that lacks a private name that we use, or has changed what it does."""


def library_changed(library: str, what: str) -> LibraryChanged:
    """Return the error for `what`, a name of `library` that is gone or has changed.

    The error states the installed version, and the versions that our metadata requires.
    """
    from importlib.metadata import PackageNotFoundError, requires, version  # late, since all commands load this module

    try:
        seen = version(library)
        tested = [r for r in requires("maskfleet") or () if re.match(rf"{library}\b(?!-)", r) and ";" not in r]
    except PackageNotFoundError:
        seen, tested = "of an unknown version", []
    return LibraryChanged(
        f"{library} {seen}: {what} is missing or has changed; tested: {', '.join(tested) or 'see pyproject.toml'}",
        remedy="install the versions that were tested: pip install -c infra/constraints.txt .",
    )
