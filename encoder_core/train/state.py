"""The progress of a run: everything that resuming needs besides tensors, as plain data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from encoder_core.optim.updates import ALL_PARAMETERS


@dataclass(frozen=True)
class TrainState:
    """Counters of the steps so far. The data position is a function of `step`, so it is not stored.

    Attributes:
        step: number of steps taken, including skipped ones; the next step has this number.
        updates: number of optimizer updates applied (Adam's t), by update group.
        skipped: number of steps in which the gradient of some update group was not finite.
        tokens: number of tokens fed to the encoder so far, including special tokens.
    """

    step: int = 0
    updates: Mapping[str, int] = field(default_factory=dict)
    skipped: int = 0
    tokens: int = 0

    def next_update_number(self, update_group: str) -> int:
        """Return the number of the next update of `update_group`, from 1."""
        return self.updates.get(update_group, 0) + 1

    def after_step(self, *, applied: Mapping[str, bool], tokens: int) -> "TrainState":
        """Return the state one step later. `applied`: whether each update group's update was applied."""
        return replace(
            self,
            step=self.step + 1,
            updates={group: self.updates.get(group, 0) + moved for group, moved in applied.items()},
            skipped=self.skipped + (not all(applied.values())),
            tokens=self.tokens + tokens,
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> "TrainState":
        """Return the state that `to_json` wrote. A plain number as `updates` is that of the group of all parameters."""
        updates = data["updates"]
        counted = updates if isinstance(updates, dict) else {ALL_PARAMETERS: updates}
        return cls(
            step=int(data["step"]),
            updates={group: int(count) for group, count in counted.items()},
            skipped=int(data["skipped"]),
            tokens=int(data["tokens"]),
        )
