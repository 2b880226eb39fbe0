"""What operations make, and what autograd keeps of a forward pass."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from encoder_core.batch import Batch
from encoder_core.cost.activations import Activations
from encoder_core.objectives.losses import LossSums
from encoder_core.objectives.losses import ObjectiveModule as Module


def saved_bytes(module: Module, forward: Callable[[], object]) -> int:
    """Bytes of distinct storages that autograd packs, parameters apart."""
    known = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    found: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        found.setdefault(
            tensor.untyped_storage().data_ptr(), tensor
        )  # kept, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(tensor.untyped_storage().nbytes() for at, tensor in found.items() if at not in known)


def measured(module: Module, batch: Batch, remembered: tuple[Tensor, ...] = ()) -> list[int]:
    """For each turn of a step."""
    sizes = []
    for _ in module.update_groups():
        losses: list[LossSums] = []
        given = (batch, remembered) if remembered else (batch,)
        sizes.append(saved_bytes(module, lambda given=given, losses=losses: losses.append(module(*given))))  # type: ignore[misc]
        remembered = losses[0].memory
    return sizes


def of_autograd(activations: Activations) -> Activations:
    """Without what is held for a whole pass, and kept by no operation: who sees whom in XLNet's streams."""
    return replace(
        activations, outside=tuple(tensor for tensor in activations.outside if tensor.what != "who sees whom")
    )


class Largest(TorchDispatchMode):
    """The most elements that the outcome of any operation has, backward passes included."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return out
