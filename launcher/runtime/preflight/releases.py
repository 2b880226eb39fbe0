"""Checks whether the installed torch was tested, whether the installed Triton is the one that torch requires, and what
a change of torch means for a run."""

from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

BIT_EQUAL_SERIES = frozenset({"2.13", "2.14", "2.15"})
"""Series of torch whose runs end in the same weights on a CPU: infra/docs/operating.md has the table, which
`tests/bench/torch_versions.py` makes."""


def admitted_versions(package: str, required_by: str = "maskfleet") -> SpecifierSet:
    """Return the versions of `package` that the installed metadata of `required_by` allow, without extras; empty if
    `required_by` does not require `package`."""
    for line in metadata.requires(required_by) or ():
        one = Requirement(line)
        if one.name == package and (one.marker is None or one.marker.evaluate({"extra": ""})):
            return one.specifier
    return SpecifierSet()


def untested_torch_warning() -> str:
    """Return a line for the operator if the installed torch was not tested; "" if it was."""
    seen, tested = metadata.version("torch"), admitted_versions("torch")
    if tested.contains(seen, prereleases=True):
        return ""
    return f"torch {seen} was not tested with Maskfleet, torch{tested} was: {seen} is used all the same"


def triton_release() -> str:
    """Return the installed release of Triton; "" if there is none."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return ""


def triton_problem() -> str:
    """Return why Triton cannot compile layers for a GPU; "" if it can. torch's CUDA wheels require a certain Triton."""
    seen = triton_release()
    if not seen:
        return "Triton is not installed"
    needed = admitted_versions("triton", required_by="torch")
    if needed.contains(seen, prereleases=True):
        return ""
    torch = metadata.version("torch")
    return f"torch {torch} requires triton{needed}, Triton {seen} is installed: Python computes the layers"


def describe_torch_change(before: str, after: str) -> str:
    """Return a line on what it means for a run to change from torch `before` to torch `after`; "" if the release is the
    same, or one of them is unknown ("")."""
    old, new = (release.partition("+")[0] for release in (before, after))
    if not (old and new) or old == new:
        return ""
    if {old.rpartition(".")[0], new.rpartition(".")[0]} <= BIT_EQUAL_SERIES:
        meaning = "both computed the same bits on a CPU; compiled layers and GPUs may round otherwise"
    else:
        meaning = "they are not known to round alike, so its steps may differ"
    return f"torch {new} goes on where torch {old} stopped: {meaning}"
