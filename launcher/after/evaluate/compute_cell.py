"""Computes one cell: claims it, so that no other process begins it, looks for its result, computes it, and stores it. A
cell ends with a result, with a mistake that another try cannot cure, or with an error that may pass.

    claims/<key>/attempts/...       as a run's attempts (checkpoints.attempt): the owner, its heartbeat, its end

A claim lasts as long as the computation, and a process that holds one waits for no other process, so processes never
block each other. A claim ends when its process says so; when the process table shows that a process of this machine is
gone; and in every other case (another machine, a process that hangs, an end that could not be written) when its
heartbeat has been silent for longer than the lease, by the store's clock.

Claims only save work. That each result is written once is ensured by its conditional put.
"""

import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from platform import python_version

from checkpoints.attempt import Attempt, Heartbeat, Owner, newest_attempt
from data_service.errors import UserError as DataError
from data_service.store.base import Store
from data_service.store.errors import KeyMissing, StoreError, StoreUnavailable
from data_service.store.open import open_store
from encoder_core.errors import UserError as ModelError
from launcher.after.evaluate.cell import CellWork, Result, Results
from launcher.after.finetune.pretrained import LocalModel
from launcher.contract import REPEAT, code_of

DEATHS = 4  # processes that die of one cell: more often than machines do by chance
BREAKS = 2  # times that a cell ends in an error that is none of ours
_TRACE = 4000  # characters


@dataclass(frozen=True)
class CellResources:
    """The resources of a cell: numbers of cores and GPUs, or fractions that several cells share. `gpus` None: one GPU
    if the cluster has any."""

    cpus: float = 1.0
    gpus: float | None = None


@dataclass(frozen=True)
class CellFailure:
    """The reason why a cell has no result.

    Attributes:
        passes: whether the same command may succeed later.
        trace: traceback of an unexpected error; empty for a mistake of the user.
    """

    problem: str
    remedy: str
    passes: bool = False
    trace: str = ""


@dataclass(frozen=True)
class Ended:
    """The end of a cell. `failure`: None if there is a result. `computed`: whether this command computed it."""

    work: CellWork
    failure: CellFailure | None
    computed: bool = True


@dataclass(frozen=True)
class Waiting:
    """A message about cells that another command computes. Each message is yielded once."""

    cells: int
    reason: str


def failure_of(work: CellWork, error: BaseException) -> CellFailure:
    """Return the failure for what a cell's computation raised, with the cell's name."""
    name = work.cell.name
    if isinstance(error, DataError | ModelError):
        return CellFailure(f"{name}: {error.problem}", error.remedy, passes=code_of(error) == REPEAT)
    line = str(error).strip().partition("\n")[0]
    trace = "".join(traceback.format_exception(error))[-_TRACE:]
    remedy = "what broke is shown; of memory that ran out, --gpus-per-cell and --cpus-per-cell leave more to a cell"
    return CellFailure(f"{name}: {type(error).__name__}: {line}", remedy, trace=trace)


def killed(work: CellWork, reason: str) -> CellFailure:
    """Return the failure of a cell whose processes have died again and again. `reason`: of the last death."""
    return CellFailure(
        f"{work.cell.name}: {DEATHS} processes in a row died while they computed it; the last: {reason}",
        "give each cell more of a machine with --cpus-per-cell or --gpus-per-cell; Ray's logs say what killed them",
    )


LEASE_S = 180.0
"""Longer than a failing store is tried again (120 s) and a beat takes: its outage makes nobody look dead."""

_LOOKS = 4  # at a listing that names what is not there


@contextmanager
def claimed(store: Store, key: str) -> Iterator[Owner | None]:
    """Claim the cell for the duration of the context. Provide None; or, if another living process has claimed the cell,
    that process. Raises StoreError and its subclasses."""
    found = take(store, key, Owner.here(time.time()))
    if isinstance(found, Owner):
        yield found
        return
    with Heartbeat(found, lease_s=LEASE_S):
        try:
            yield None
        finally:
            with suppress(StoreError):  # then the lease tells
                found.end(time.time())


def take(store: Store, key: str, owner: Owner) -> Attempt | Owner:
    """Claim the cell for `owner`, whose heartbeat must be kept from now on. Returns None, or the living process that
    has it. Raises StoreError kinds."""
    while True:
        newest, living = _newest(store, key)
        if living is not None:
            return living
        attempt = Attempt(newest.store, newest.number + 1)
        if attempt.take(owner):
            return attempt


def holder(store: Store, key: str) -> Owner | None:
    """Return the living process that computes the cell, as far as its heartbeat tells; None if there is none. Raises
    StoreError."""
    return _newest(store, key)[1]


def _newest(store: Store, key: str) -> tuple[Attempt, Owner | None]:
    """Return the newest claim, 0 for none, and whose it is if it holds."""
    place = store.at(f"claims/{key}")
    for _ in range(_LOOKS):
        newest = Attempt(place, newest_attempt(place))
        if not newest.number:
            return newest, None
        with suppress(KeyMissing):  # a listing that was damaged on its way: no claim is ever deleted
            return newest, _living(newest)
    raise StoreUnavailable.at(place.uri, "it lists claims that are not there")


def _living(claim: Attempt) -> Owner | None:
    owner = claim.owner()
    if claim.ended() is not None or (owner.is_here() and not owner.is_running()):
        return None
    return owner if claim.silence() < LEASE_S else None


_VERSIONED = ("maskfleet", "torch", "transformers", "sentence-transformers", "scikit-learn", "numpy")


def compute(work: CellWork, pretrained: LocalModel, results: str, place: Path) -> bool | Owner:
    """Compute the cell and store its result at the URI `results`, unless the result is there. Return whether it was
    computed; or, if another living process computes it, that process.

    `place`: folder that the cells on this machine share. Raises subclasses of UserError if the cell cannot be measured
    or the store does not answer.
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
    """Return the versions of the installed packages that compute results."""
    found = {"python": python_version()}
    for name in _VERSIONED:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
