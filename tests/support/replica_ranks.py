"""Ranks that look at their weights: alike after a step, and not after a bit of one of them has turned over."""

from dataclasses import dataclass

import small_training as small
import torch

from encoder_core.layers.initialise import initialise
from encoder_core.train.exchange import Control
from encoder_core.train.weight_check import CorruptReplica, ensure_same

DAMAGED = 1  # the rank


@dataclass(frozen=True)
class Look:
    """What a rank found under one setting.

    Attributes:
        named: the weights that it compares.
        well: no difference was found before the damage.
        missed: weights of which a bit could turn over unnoticed.
        blamed: the ranks that were blamed.
        weight: the weight that was named, if it was always the right one.
    """

    named: list[str]
    well: bool
    missed: list[str]
    blamed: set[tuple[int, ...]]
    right: bool


def look(rank: int, world: int, settings: list[small.Setting]) -> list[Look]:
    """A step under each setting, then damage to every weight in turn, at its last element."""
    return [_look(Control.join(), setting) for setting in settings]


def _look(control: Control, setting: small.Setting) -> Look:
    torch.manual_seed(small.SEED)
    model = small.Poisonable()
    initialise(model)
    engine = small.engine_of(model, setting)
    small.step_of(engine, control, 0)
    named = [(name, weight) for name, weight in engine.replicated.named]
    well = _found(engine, control) is None
    missed, blamed, right = [], set(), True
    for name, weight in named:
        bits = weight.detach().view(-1).view({2: torch.int16, 4: torch.int32}[weight.element_size()])
        bits[-1] ^= control.rank == DAMAGED
        error = _found(engine, control)
        bits[-1] ^= control.rank == DAMAGED
        if error is None:
            missed.append(name)
        else:
            blamed.add(error.ranks)
            right &= error.tensor == name
    return Look([name for name, _ in named], well, missed, blamed, right)


def _found(engine: "small.Engine", control: Control) -> CorruptReplica | None:
    try:
        ensure_same(engine.replicated, control, 1)
    except CorruptReplica as error:
        return error
    return None
