"""What a build says while it works."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Stage = Literal[
    "measuring", "reading", "comparing", "dividing", "writing", "assembling", "already built", "clearing up"
]


@dataclass(frozen=True)
class Progress:
    """Tasks done of a stage, and bytes of its input; what an interrupted build had done counts as done.

    Stages come in the order of `Stage`. "measuring" is of big compressed files only. A corpus that is complete gives
    one "already built", and "clearing up" if an interrupted build left something to clear up.
    """

    stage: Stage
    done: int
    total: int
    bytes_done: int
    bytes_total: int


Report = Callable[[Progress], None]
