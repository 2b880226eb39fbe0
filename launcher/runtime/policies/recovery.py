"""The settings of what happens between the death of a rank and the next step."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveInt


class Recovery(BaseModel):
    """What a run holds ready, so that the death of a rank costs little time.

    Attributes:
        spares: number of processes on each node that have loaded the libraries and wait for a rank to die. Each costs
            the memory of a process that has imported torch, about 0.5 GB, and no GPU memory.
        memory_every: number of steps after which the ranks copy their state to the memory of their node and of another
            node. "auto": as often as it takes at most 1 % of the time. "never": a restart reads the last checkpoint.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    spares: NonNegativeInt = 1
    memory_every: PositiveInt | Literal["auto", "never"] = "auto"
