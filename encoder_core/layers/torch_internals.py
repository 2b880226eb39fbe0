"""Every private name of torch's that we call; only this file calls any.

Each is looked for where it is used, and raises `LibraryChanged` if a release of torch has another one.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from encoder_core.errors import library_changed

NAMES = (
    "ops.aten._flash_attention_forward",
    "_softmax_backward_data",
    "_foreach_add_",
    "utils._pytree.tree_leaves",
    "utils._python_dispatch.TorchDispatchMode",
)
COMPILING = (
    "_dynamo.mark_dynamic",
    "_dynamo.utils.counters",
    "fx.experimental._config.patch",
    "fx.experimental._config.use_duck_shape",
    "_dynamo.config.recompile_limit",
)
"""Those that importing the compiler defines."""


def name_of(path: str) -> Any:
    """What torch has at this dotted path. Raises LibraryChanged: nothing."""
    found: Any = torch
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise library_changed("torch", path) from error
    return found


def flash_attention(*operands: Any, window: int | None) -> Tensor:
    """The operator beneath `torch.nn.attention.varlen.varlen_attn`; its context only."""
    operator = name_of(NAMES[0])
    context: Tensor = operator(*operands, window_size_left=window, window_size_right=window)[0]
    return context


def softmax_backward(gradient: Tensor, weights: Tensor) -> Tensor:
    """The derivative by the scores, of which `weights` are the softmax over the last dimension."""
    found: Tensor = name_of(NAMES[1])(gradient, weights, -1, weights.dtype)
    return found


def add_to_each(tensors: Sequence[Tensor], others: Sequence[Tensor], factor: float) -> None:
    """tensors[i] += factor * others[i], in place, by few kernels."""
    name_of(NAMES[2])(tensors, others, alpha=factor)


def tensors_in(tree: Any) -> list[Tensor]:
    """All tensors in nested containers."""
    return [leaf for leaf in name_of(NAMES[3])(tree) if isinstance(leaf, Tensor)]


def dispatch_mode() -> Any:
    """The class of contexts that see every operation."""
    return name_of(NAMES[4])


def mark_dynamic(tensor: Tensor) -> None:
    """The compiler takes the first dimension for one that varies."""
    name_of(COMPILING[0])(tensor, 0)


def sizes_apart() -> AbstractContextManager[None]:
    """While the compiler traces: two sizes that happen to be equal now are not the same size."""
    name_of(COMPILING[3])
    patch: AbstractContextManager[None] = name_of(COMPILING[2])(use_duck_shape=False)
    return patch


def limit_graphs(most: int) -> None:
    """Of one function, in this process: before torch 2.12, `torch.compile` takes no such limit."""
    name_of(COMPILING[4])
    name_of("_dynamo.config").recompile_limit = most


def forget_graphs() -> None:
    """What was compiled in this process, and the count of it."""
    torch.compiler.reset()
    name_of(COMPILING[1]).clear()


def graphs_compiled() -> int:
    """In this process."""
    return int(name_of(COMPILING[1])["stats"]["unique_graphs"])
