"""Errors a user can act on: each says what is wrong, where, and what to do."""

import re
from importlib.metadata import PackageNotFoundError, requires, version

from data_service.printable import without_secrets


class UserError(Exception):
    """A mistake in what the user gave us. The CLI prints it without a traceback and exits non-zero.

    `problem` names the path and the value; `remedy` is the next thing to try. Keys in URIs are not in either: errors
    are logged and recorded in many places.
    """

    def __init__(self, problem: str, *, remedy: str) -> None:
        self.problem, self.remedy = without_secrets(problem), without_secrets(remedy)
        super().__init__(self.problem, self.remedy)

    def __str__(self) -> str:
        return f"{self.problem}\n  remedy: {self.remedy}"

    def __reduce__(self) -> tuple[object, ...]:  # survives the trip through a Ray worker
        return (_rebuild, (type(self), self.problem, self.remedy))


def _rebuild(kind: type[UserError], problem: str, remedy: str) -> UserError:
    return kind(problem, remedy=remedy)


class InputError(UserError):
    """Raw text that cannot be read as asked: missing, empty, undecodable."""


class CorpusError(UserError):
    """A built corpus that does not fit what is asked of it: absent, mismatched, too small."""


class CorruptBlock(CorpusError):
    """Stored bytes that do not match the manifest's hash."""


class TokenizerError(UserError):
    """A tokenizer that cannot be trained or loaded as asked."""


class PlanError(UserError):
    """A data plan that cannot be made from this corpus and these settings."""


class BuildFailed(UserError):
    """Samples could not be built: the tasks that build them died again and again, most likely for lack of memory."""


class LibraryChanged(UserError):
    """A library whose private names are not those that we use."""


def library_changed(library: str, what: str) -> LibraryChanged:
    """`what` is gone or does something else. Says which version was seen, and which were tested, by our metadata."""
    try:
        seen = version(library)
        tested = [
            r for r in requires("maskfleet") or () if re.match(rf"{library}\b(?!-)", r) and ";" not in r
        ]
    except PackageNotFoundError:
        seen, tested = "of an unknown version", []
    return LibraryChanged(
        f"{library} {seen}: {what} is not what Maskfleet uses; tested: {', '.join(tested) or 'see pyproject.toml'}",
        remedy="install the versions that were tested: pip install -c infra/constraints.txt .",
    )
