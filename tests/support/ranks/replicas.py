"""The small model on several ranks: how its gradients are added up, and that a damaged replica is found."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from encoder_core.train.engine import Engine
from encoder_core.train.exchange import RankGroup
from encoder_core.train.step import RankBatch, accumulate_gradients, seed_draws
from encoder_core.train.weight_check import CorruptReplica, ensure_same_weights
from tests.support.ranks import small_training as small
from tests.support.ranks.fragments import Piece, kind_of, pieces
from tests.support.ranks.small_training import Setting

MICROBATCHES = 8
LARGE = 1000  # elements: more than any flag, norm or table, less than the gradients


@dataclass(frozen=True)
class Reduced:
    """Of one setting: dtypes of the large sums over ranks, and this rank's part of the first moment of the gradient."""

    dtypes: set[str]
    moment: list[Piece]


class Sums(TorchDispatchMode):
    """The dtypes of all large tensors that ranks add up, whatever function asked for it."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d" and "reduce" in func.name():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
            self.dtypes |= {str(t.dtype).removeprefix("torch.") for t in tensors if t.numel() > LARGE}
        return func(*args, **(kwargs or {}))


def first_gradient(rank: int, world: int, settings: list[Setting]) -> list[Reduced]:
    """The gradient of the first step under each setting, from its first moment; the same microbatches at any world."""
    control = RankGroup.join()
    return [_reduce(control, setting) for setting in settings]


def assemble(ranks: list[Reduced]) -> np.ndarray:
    """The whole gradient, flat, parameters in order of their names."""
    return np.concatenate(list(kind_of((rank.moment for rank in ranks), "exp_avg").values())) / (1 - 0.9)


def reference(dtype: torch.dtype) -> np.ndarray:
    """The whole gradient by plain PyTorch: of each microbatch in `dtype`, summed in fp32."""
    model = small.fresh_model()
    model.to(dtype)
    microbatches = [small.microbatch(0, i) for i in range(MICROBATCHES)]
    targets = sum(m.batch.target_ids.numel() for m in microbatches)
    named = sorted(model.named_parameters())
    total = [torch.zeros(p.numel()) for _, p in named]
    for microbatch in microbatches:
        seed_draws(small.SEED, 0, microbatch.index)
        loss = model(microbatch.batch).terms[0].loss_sum / targets
        for own, part in zip(total, torch.autograd.grad(loss, [p for _, p in named]), strict=True):
            own += part.flatten().float()
    return torch.cat(total).numpy()


def _reduce(control: RankGroup, setting: Setting) -> Reduced:
    engine = small.engine_of(small.fresh_model(), setting)
    mine = tuple(small.microbatch(0, i) for i in range(MICROBATCHES) if i % control.world == control.rank)
    counts = {"mlm": float(control.gather_rows([sum(m.batch.target_ids.numel() for m in mine)]).sum())}
    with Sums() as sums:
        accumulate_gradients(engine, RankBatch(0, mine, MICROBATCHES), counts, small.SEED, {})
        engine.update(1e-3, 1)
    return Reduced(sums.dtypes, pieces(engine.fragments(), ["exp_avg"]))


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
    return [_look(RankGroup.join(), setting) for setting in settings]


def _look(control: RankGroup, setting: small.Setting) -> Look:
    engine = small.engine_of(small.fresh_model(), setting)
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


def _found(engine: Engine, control: RankGroup) -> CorruptReplica | None:
    try:
        ensure_same_weights(engine.replicated, control, 1)
    except CorruptReplica as error:
        return error
    return None
