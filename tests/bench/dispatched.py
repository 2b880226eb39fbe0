"""Counts what a step gives a device to do, and what it waits for.

Every operation passes a dispatch mode, backward passes and the inside of our own functions included. A view or an empty
tensor gives a device nothing to do; of everything else an operation is taken for one kernel, which is a lower bound.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITING = {
    *("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim"),
    *("equal", "is_nonzero", "bincount"),
}
_EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
_NOTHING = _EMPTY | {"detach", "_pin_memory", "is_pinned", "device", "promote_types", "_unsafe_view"}
_NOTHING |= {"_record_function_enter_new", "_record_function_exit"}


class Dispatched(TorchDispatchMode):
    """What was dispatched while this mode was on.

    Attributes:
        kernels: operations, by name, and launches of Triton's kernels (`launched`).
        waits: the operations for whose outcome a GPU would be waited: numbers that the host reads, sizes that depend on
            data, and copies between host and device that are not told to come later.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[str] = Counter()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name not in _NOTHING and not is_view(func) and not _of_host(args, out):
            self.kernels[name] += 1
        if name in _WAITING or _depends_on_data(name, args, kwargs) or _is_copied(name, args, kwargs, out):
            self.waits.append(name)
        return out

    @property
    def count(self) -> int:
        return self.kernels.total()


def is_view(func: Any) -> bool:
    """Whether the outcome lies where an argument lies and nothing is written."""
    aliases = [result.alias_info for result in func._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _of_host(args: Sequence[Any], out: Any) -> bool:
    """Single numbers that only the host has: which draw of a forward pass comes next. Where all is on a CPU, told by
    their being alone."""
    tensors = [x for x in tree_leaves((args, out)) if isinstance(x, Tensor)]
    return bool(tensors) and all(x.device.type == "cpu" and x.dim() == 0 for x in tensors)


def _depends_on_data(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    if name.startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple):
        return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    return name == "repeat_interleave" and kwargs.get("output_size") is None


def _is_copied(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> bool:
    if name == "copy_":
        return args[0].device.type != args[1].device.type and not (len(args) > 2 and args[2])
    if name != "_to_copy" or args[0].device.type == out.device.type:
        return False
    return not kwargs.get("non_blocking", False)
