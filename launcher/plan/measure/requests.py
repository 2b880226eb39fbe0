"""What the command and the ranks that measure exchange: requests and results. Does not import DeepSpeed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel


class MeasureRequest(BaseModel):
    """What one rank is asked to do: take steps of `run`. Ranks meet at the file `meeting`; the rank writes what it
    found to the file `result`."""

    run: str
    rank: int
    world: int
    device: Literal["cuda", "cpu"]
    threads: int
    meeting: str
    result: str


@dataclass(frozen=True)
class Step:
    """One rank's seconds of one step, and the tokens of all ranks.

    Attributes:
        data: until the rows were there. forward, backward: of all its microbatches. last: of the last backward pass.
        update: clipping, the optimizer, and gathering what it changed.
    """

    seconds: float
    data: float
    forward: float
    backward: float
    last: float
    update: float
    tokens: int


@dataclass(frozen=True)
class Measured:
    """What one rank found.

    Attributes:
        steps: those that count.
        peak_bytes: the most memory that the run filled, at any time of the first two steps.
        peak_flops: FLOP/s of its device, as MFU takes them; None if they are not known.
        mfu: of each step that counts, over all ranks; empty without `peak_flops`.
        exchange: share of a step that collectives take, waiting for other ranks included.
        operators: the slowest operators, with their shares of what all operators take.
    """

    steps: tuple[Step, ...]
    peak_bytes: int
    peak_flops: float | None
    mfu: tuple[float, ...]
    exchange: float
    operators: tuple[tuple[str, float], ...]


def read_taken(file: Path) -> Measured:
    """What a rank has left in its file."""
    found = json.loads(file.read_text("utf-8"))
    steps = tuple(Step(**step) for step in found["steps"])
    operators = tuple((name, share) for name, share in found["operators"])
    return Measured(**found | {"steps": steps, "operators": operators, "mfu": tuple(found["mfu"])})
