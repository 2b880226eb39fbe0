"""How patient the watchdog is. Apart from it, so that reading a recipe does not load Ray."""

from pydantic import BaseModel, ConfigDict, Field


class Watchdog(BaseModel):
    """Seconds without progress after which the ranks are killed and started again.

    Attributes:
        step: in training, for one step.
        other: in anything else: starting, loading, evaluating, saving.
        silence: without any sign of life.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step: float = Field(default=600.0, gt=0)
    other: float = Field(default=1800.0, gt=0)
    silence: float = Field(default=120.0, gt=0)
