"""Requests to the ranks that measure, and their results. This module does not import DeepSpeed."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel


class MeasureRequest(BaseModel):
    """The request to one rank: take steps of `run`. Ranks meet through the file `meeting`; each writes its
    measurements to the file `result`.
    """

    run: str
    rank: int
    world: int
    device: Literal["cuda", "cpu"]
    threads: int
    meeting: str
    result: str


@dataclass(frozen=True)
class Step:
    """The seconds of one step on one rank, and the tokens of all ranks.

    Attributes:
        data: wait for the rows.
        forward, backward: passes of all microbatches of the rank.
        last: the backward pass of the last microbatch.
        update: clipping, the optimizer, and gathering the updated weights.
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
    """The measurements of one rank.

    Attributes:
        steps: the timed steps, without warm-up.
        peak_bytes: most memory that the run filled during the first two steps.
        peak_flops: peak FLOP/s of the device, as MFU uses it; None if unknown.
        mfu: MFU of each timed step over all ranks; empty without `peak_flops`.
        exchange: share of a step that collectives take, including the wait for other ranks.
        operators: the slowest operators, each with its share of the time of all operators.
    """

    steps: tuple[Step, ...]
    peak_bytes: int
    peak_flops: float | None
    mfu: tuple[float, ...]
    exchange: float
    operators: tuple[tuple[str, float], ...]


def read_taken(file: Path) -> Measured:
    """Read the measurements that a rank wrote to `file`."""
    found = json.loads(file.read_text("utf-8"))
    steps = tuple(Step(**step) for step in found["steps"])
    operators = tuple((name, share) for name, share in found["operators"])
    return Measured(**found | {"steps": steps, "operators": operators, "mfu": tuple(found["mfu"])})
