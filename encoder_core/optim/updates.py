"""What an optimizer is told from outside before each update: its learning rate, its number, and which update group
moves.

None of it is optimizer state. All are functions of the run's position, so a checkpoint stores a count of
applied updates for each update group and moments per parameter, and no optimizer keeps a counter that could
disagree with it. (DeepSpeed calls `step` once per group or sub-group: a counter inside would run ahead at
ZeRO 3.)
"""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from encoder_core.errors import TrainingError

# Keys of a parameter group, beside torch's own.
UPDATE = "step"
LR_SCALE = "lr_scale"
UPDATE_GROUP = "update_group"
ACTIVE = "active"

WHOLE = "all"
"""The name of the one update group that moves all parameters together, as in nearly every objective."""


def set_update(optimizer: Optimizer, *, lr: float, count: int, update_group: str = WHOLE) -> None:
    """Prepare update number `count`, from 1, at learning rate `lr` (times each group's `lr_scale`).

    The next `step` leaves the weights and moments of other update groups alone.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(LR_SCALE, 1.0)
        group[UPDATE] = count
        group[ACTIVE] = group.get(UPDATE_GROUP, WHOLE) == update_group


def due(group: dict[str, Any]) -> list[Tensor]:
    """The tensors of a group that the next update moves: those with a gradient, if the group is active."""
    return [p for p in group["params"] if p.grad is not None] if group[ACTIVE] else []


def update_count(group: dict[str, Any]) -> int:
    """The number of the update about to be applied. Raises TrainingError if it was never set."""
    count = int(group[UPDATE])
    if count < 1:
        raise TrainingError(
            f"the optimizer was asked for update number {count}",
            remedy="call set_update(optimizer, lr=..., count=...) before each step; counts begin at 1",
        )
    return count
