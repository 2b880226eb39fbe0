"""What one rank holds after a step under each setting; importable by name, as `run_ranks` needs."""

import gc
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from encoder_core.batch import Batch
from encoder_core.objectives.losses import LossSums, Term
from encoder_core.optim.adamw import AdamW, AdamWConfig
from encoder_core.optim.groups import parameter_groups
from encoder_core.optim.updates import WHOLE
from encoder_core.train.collate import idle_batch
from encoder_core.train.engine import Engine
from encoder_core.train.engine_config import EngineConfig, Precision

Setting = tuple[Literal[0, 1, 2, 3], Precision]
WIDTH, DEPTH = 512, 8


class Wide(nn.Module):
    """Large against all that is not weights, gradients or optimizer state: DEPTH matrices of WIDTH x WIDTH."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))

    def forward(self, batch: Batch) -> LossSums:
        x = torch.ones(1, WIDTH, dtype=self.layers[0].weight.dtype)
        for layer in self.layers:
            x = layer(x)
        return LossSums((Term("mlm", x.float().sum(), 1),))


def state_bytes(rank: int, world: int, setting: Setting, larger: int) -> int:
    """Bytes of the storages that a step adds and that are there between microbatches, at most.

    Those of less than a matrix over the ranks, and those of `larger` bytes and more, are left out. Once a process:
    nobody knows when an engine's storages go.
    """
    smaller = WIDTH * WIDTH // world
    gc.collect()
    before = _large(smaller, larger)  # a sum: an address that is free again may be taken by what is counted
    model = Wide()
    engine = Engine(
        model,
        AdamW(parameter_groups(model, 0.01), AdamWConfig(lr=1e-3)),
        EngineConfig(*setting, clip=None, persistence_threshold=0 if setting[0] == 3 else None),
    )
    most = 0
    for count in (1, 2):  # moments come with the first update
        for last in (False, True):
            engine.begin(WHOLE)
            losses = engine(idle_batch(torch.device("cpu")))
            engine.backward(losses.terms[0].loss_sum, last=last)
            del losses
            most = max(most, _staying(smaller, larger) - before)
        engine.update(1e-3, count)
    return most


def _staying(smaller: int, larger: int) -> int:
    """`_large`, of what is still there when a further collective is done: gloo's threads let go of what they added up
    a moment after the sum is there."""
    found = []
    for _ in range(3):
        dist.barrier()
        gc.collect()
        found.append(_large(smaller, larger))
    return min(found)


def _large(smaller: int, larger: int) -> int:
    """Bytes of the storages there are, of those of `smaller` bytes and more, but less than `larger`."""
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for size in sizes.values() if smaller <= size < larger)
