"""What a build says while it works."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Stage = Literal["reading", "comparing", "dividing", "writing", "already built"]


@dataclass(frozen=True)
class Progress:
    """Tasks done of a stage, and bytes of its input; what an interrupted build had done counts as done.

    Stages come in the order of `Stage`; a corpus that is complete gives one "already built" and nothing else.
    """

    stage: Stage
    done: int
    total: int
    bytes_done: int
    bytes_total: int


Report = Callable[[Progress], None]
