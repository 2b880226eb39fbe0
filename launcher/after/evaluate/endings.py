"""How cells end: with a result, with a mistake that repeating cannot cure, or with an error that may pass."""

import traceback
from dataclasses import dataclass

from data_service.errors import UserError as DataError
from encoder_core.errors import UserError as ModelError
from launcher.after.evaluate.cell import CellWork
from launcher.contract import REPEAT, code_of

DEATHS = 4  # processes that die of one cell: more often than machines do by chance
BREAKS = 2  # times that a cell ends in an error that is none of ours
_TRACE = 4000  # characters


@dataclass(frozen=True)
class CellResources:
    """What a cell takes of a machine: cores and GPUs, or fractions of one that several cells share. `gpus` None: one
    where the cluster has any."""

    cpus: float = 1.0
    gpus: float | None = None


@dataclass(frozen=True)
class CellFailure:
    """Why a cell has no result.

    Attributes:
        passes: whether the same command may do better.
        trace: where code broke, if it was no mistake of the user's; else empty.
    """

    problem: str
    remedy: str
    passes: bool = False
    trace: str = ""


@dataclass(frozen=True)
class Ended:
    """A cell is over. `failure` is None where there is a result now; `computed`: by a process of this command."""

    work: CellWork
    failure: CellFailure | None
    computed: bool = True


@dataclass(frozen=True)
class Waiting:
    """News about cells that this command does not compute at present; each is said once."""

    cells: int
    reason: str


def failure_of(work: CellWork, error: BaseException) -> CellFailure:
    """The failure for what a cell's computation raised, with the cell's name."""
    name = work.cell.name
    if isinstance(error, DataError | ModelError):
        return CellFailure(f"{name}: {error.problem}", error.remedy, passes=code_of(error) == REPEAT)
    line = str(error).strip().partition("\n")[0]
    trace = "".join(traceback.format_exception(error))[-_TRACE:]
    remedy = "what broke is shown; of memory that ran out, --gpus-per-cell and --cpus-per-cell leave more to a cell"
    return CellFailure(f"{name}: {type(error).__name__}: {line}", remedy, trace=trace)


def killed(work: CellWork, reason: str) -> CellFailure:
    """The failure of a cell whose processes have died again and again. `reason`: of the last death."""
    return CellFailure(
        f"{work.cell.name}: {DEATHS} processes in a row died while they computed it; the last: {reason}",
        "give each cell more of a machine with --cpus-per-cell or --gpus-per-cell; Ray's logs say what killed them",
    )
