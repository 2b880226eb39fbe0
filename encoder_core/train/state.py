"""Where a run stands: everything a resume needs beside the tensors, as plain data."""

from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class TrainState:
    """Counters of the committed past. The data position is a function of `step`, so it is not stored twice.

    Attributes:
        step: steps taken, skipped ones included; the next step has this number.
        updates: optimizer updates applied (Adam's t).
        skipped: steps whose gradient was not finite.
        tokens: tokens fed to the encoder so far, special tokens included.
    """

    step: int = 0
    updates: int = 0
    skipped: int = 0
    tokens: int = 0

    def after(self, *, applied: bool, tokens: int) -> "TrainState":
        """The state one step later."""
        return replace(
            self,
            step=self.step + 1,
            updates=self.updates + applied,
            skipped=self.skipped + (not applied),
            tokens=self.tokens + tokens,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "TrainState":
        return cls(**{key: int(data[key]) for key in ("step", "updates", "skipped", "tokens")})
