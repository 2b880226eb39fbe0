"""How often all ranks compare their weights (`encoder_core.train.weight_check` says what that finds)."""

from typing import Literal

from pydantic import BaseModel, ConfigDict, PositiveInt

_LASTING = 100  # steps; where damage stays, it is found later, too


class Replicas(BaseModel):
    """Steps from one comparison of the ranks' weights to the next; every commit has one, whatever this says.

    Attributes:
        every: `auto`: each step at ZeRO 1 and 2, where damage lasts until the next update only and a look takes
            two reductions; every 100 steps at ZeRO 0, where it lasts. Null: at commits only.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    every: PositiveInt | Literal["auto"] | None = "auto"

    def interval(self, zero: int) -> int | None:
        """In steps at ZeRO stage `zero`; None for never. Stage 3 holds nothing twice that could be compared."""
        if zero == 3 or self.every is None:
            return None
        if self.every == "auto":
            return _LASTING if zero == 0 else 1
        return self.every
