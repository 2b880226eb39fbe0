"""What one rank holds after a step under each setting; importable by name, as `run_ranks` needs."""

import gc
from typing import Literal

import torch
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


def state_bytes(rank: int, world: int, settings: list[Setting], larger: int) -> list[int]:
    """By setting, bytes of the storages that a step adds and that are there between microbatches, at most.

    Those of less than a matrix over the ranks, and those of `larger` bytes and more, are left out.
    """
    return [_most(setting, WIDTH * WIDTH // world, larger) for setting in settings]


def _most(setting: Setting, smaller: int, larger: int) -> int:
    gc.collect()
    before = _storages().keys()
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
            gc.collect()
            sizes = (size for at, size in _storages().items() if at not in before)
            most = max(most, sum(size for size in sizes if smaller <= size < larger))
        engine.update(1e-3, count)
    return most


def _storages() -> dict[int, int]:
    """Bytes by address."""
    tensors = [found for found in gc.get_objects() if type(found) in (torch.Tensor, nn.Parameter)]
    storages = [tensor.untyped_storage() for tensor in tensors if tensor.device.type == "cpu"]
    return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}
