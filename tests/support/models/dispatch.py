"""Watches what operations make."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


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


_WAITING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim"),
    *("equal", "is_nonzero", "bincount"),
}


class Waits(TorchDispatchMode):
    """The operations for whose outcome a GPU would be waited: numbers that the host reads, and sizes that depend on
    data; backward passes included. `operations` counts all."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.found = 0, list[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name, self.operations = func.overloadpacket.__name__, self.operations + 1
        if name in _WAITING or _depends_on_data(name, args, kwargs or {}):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


def _depends_on_data(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if name.startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return name == "repeat_interleave" and kwargs.get("output_size") is None
