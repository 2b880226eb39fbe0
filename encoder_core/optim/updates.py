"""Settings of an optimizer's next update: its learning rate, its number, and which update group it changes.

These settings are not optimizer state: the trainer sets them before each update. A checkpoint stores the number of
applied updates of each update group and the moments of each parameter, and no optimizer has a counter that could
disagree. (DeepSpeed calls `step` once for each group or sub-group: a counter inside would run ahead at ZeRO 3.)
"""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from encoder_core.errors import TrainingError
from encoder_core.optim.settings import OptimizerSettings

# Keys that we add to torch's parameter groups.
UPDATE_NUMBER_KEY = "step"  # number of the next update, from 1; 0 until `set_update` is called
LR_SCALE = "lr_scale"  # factor of the learning rate
UPDATE_GROUP = "update_group"  # name of the update that changes the group's tensors
ACTIVE = "active"  # whether the next update changes the group's tensors

ALL_PARAMETERS = "all"
"""Name of the update group of all parameters; nearly every objective has only this one."""


def group_defaults(config: OptimizerSettings, *, bias_correction: bool) -> dict[str, Any]:
    """Return the initial values of every parameter group, for any optimizer. `set_update` is still to be called."""
    return {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "weight_decay": config.weight_decay,
        "bias_correction": bias_correction,
        LR_SCALE: 1.0,
        UPDATE_NUMBER_KEY: 0,
        ACTIVE: True,
    }


def set_update(optimizer: Optimizer, *, lr: float, count: int, update_group: str = ALL_PARAMETERS) -> None:
    """Prepare update number `count`, from 1, at learning rate `lr` (times each group's `lr_scale`).

    The next `step` does not change the weights and moments of other update groups.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get(LR_SCALE, 1.0)
        group[UPDATE_NUMBER_KEY] = count
        group[ACTIVE] = group.get(UPDATE_GROUP, ALL_PARAMETERS) == update_group


def tensors_to_update(group: dict[str, Any]) -> list[Tensor]:
    """Return the tensors of a group that the next update changes: those with a gradient, if the group is active."""
    return [p for p in group["params"] if p.grad is not None] if group[ACTIVE] else []


def next_update_number(group: dict[str, Any]) -> int:
    """Return the number, from 1, of the update that the optimizer's next `step` applies.

    Raises:
        TrainingError: `set_update` was not called.
    """
    count = int(group[UPDATE_NUMBER_KEY])
    if count < 1:
        raise TrainingError(
            f"the number of the optimizer's next update is {count}, but updates are counted from 1",
            remedy="call set_update(optimizer, lr=..., count=...) before each step",
        )
    return count
