"""What a process does with one cell: claim it, look whether its result is there, compute it, store it."""

from importlib import metadata
from pathlib import Path
from platform import python_version

from checkpoints.attempt import Owner
from data_service.store.open import open_store
from launcher.evaluate.cell import CellWork, Result
from launcher.evaluate.claims import claimed
from launcher.evaluate.results import Results
from launcher.finetune.pretrained import LocalModel

_VERSIONED = ("maskfleet", "torch", "transformers", "sentence-transformers", "scikit-learn", "numpy")


def compute(work: CellWork, pretrained: LocalModel, results: str, place: Path) -> bool | Owner:
    """Compute the cell and store its result at the URI `results`, unless the result is there. Returns whether it was
    computed; or, if another living process computes it, that process.

    `place`: a folder of this machine that its cells share. Raises UserError kinds: the cell cannot be measured, or the
    store does not answer.
    """
    found, key = Results(open_store(results)), work.cell.key
    with claimed(found.store, key) as other:
        if other is not None:
            return other
        if found.find(key) is not None:  # now that nobody computes it
            return False
        measured = work.measure.measure(pretrained, work.cell.seed, place)
        found.keep(Result(rules=found.rules, cell=work.cell, measured=measured, versions=versions()))
        return True


def versions() -> dict[str, str]:
    """Versions of the installed packages that compute results."""
    found = {"python": python_version()}
    for name in _VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
