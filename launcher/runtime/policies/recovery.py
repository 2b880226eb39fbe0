"""The settings of what happens between the death of a rank and the next step."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt

COPIES_SHARE = 0.003
"""Share of the time that copies of the state in memory take at most with `memory_every: auto`. At one failure in some
hours, copies that take more cost more than the steps that they save."""


class Recovery(BaseModel):
    """What a run holds ready, so that the death of a rank costs little time.

    Attributes:
        spares: number of processes on each node that have loaded the libraries and wait for a rank to die. Each costs
            the memory of a process that has imported torch, about 0.5 GB, and no GPU memory.
        memory_every: number of steps after which the ranks copy their state to the memory of their node and of another
            node. "auto": as often as it takes at most 0.3 % of the time. "never": a restart reads the last checkpoint.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    spares: NonNegativeInt = 1
    memory_every: PositiveInt | Literal["auto", "never"] = "auto"
