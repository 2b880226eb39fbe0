"""What an optimizer is told from outside before each update: its learning rate and its number.

Neither is optimizer state. Both are functions of the run's position, so a checkpoint stores one count of
applied updates for the whole run and moments per parameter, and no optimizer keeps a counter that could
disagree with it. (DeepSpeed calls `step` once per group or sub-group: a counter inside would run ahead at
ZeRO 3.)
"""

from typing import Any

from torch.optim import Optimizer

from encoder_core.errors import TrainingError

# Keys of a parameter group, beside torch's own.
UPDATE = "step"
LR_SCALE = "lr_scale"


def set_update(optimizer: Optimizer, *, lr: float, count: int) -> None:
    """Prepare update number `count`, from 1, at learning rate `lr` (times each group's `lr_scale`)."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(LR_SCALE, 1.0)
        group[UPDATE] = count


def update_count(group: dict[str, Any]) -> int:
    """The number of the update about to be applied. Raises TrainingError if it was never set."""
    count = int(group[UPDATE])
    if count < 1:
        raise TrainingError(
            f"the optimizer was asked for update number {count}",
            remedy="call set_update(optimizer, lr=..., count=...) before each step; counts begin at 1",
        )
    return count
