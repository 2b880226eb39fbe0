"""All uses of private names of torch; other files use none.

Each name is looked up when it is used, and `LibraryChanged` is raised if a release of torch has renamed it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from encoder_core.errors import library_changed

PRIVATE_NAMES = (  # dotted paths in torch; the functions below refer to them by index
    "ops.aten._flash_attention_forward",
    "_softmax_backward_data",
    "_foreach_add_",
    "utils._pytree.tree_leaves",
    "utils._python_dispatch.TorchDispatchMode",
    "distributed.distributed_c10d._world",
    "ops.aten._scaled_dot_product_efficient_attention",
    "ops.aten._flash_attention_backward",
    "ops.aten._scaled_dot_product_efficient_attention_backward",
    "_subclasses.fake_tensor",
    "_foreach_copy_",
    "_foreach_mul_",
    "_foreach_add",
    "_foreach_norm",
    "_fused_adamw_",
)
COMPILER_NAMES = (
    "_dynamo.mark_dynamic",
    "_dynamo.utils.counters",
    "fx.experimental._config.patch",
    "fx.experimental._config.use_duck_shape",
    "_dynamo.config.recompile_limit",
)
"""Private names that exist only after torch's compiler is imported."""

WRAPPED_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
"""Methods of torch's optimizers whose first call imports the compiler."""


def resolve(path: str) -> Any:
    """Return the object at this dotted path in torch.

    Raises:
        LibraryChanged: torch has no such object.
    """
    found: Any = torch
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise library_changed("torch", path) from error
    return found


def flash_attention(*operands: Any, window: int | None, causal: bool) -> Tensor:
    """Run torch's flash attention over rows, by the operator that `torch.nn.attention.varlen.varlen_attn` calls.

    `operands`: queries, keys, values; bounds of the rows of queries and of keys; the longest rows' lengths; dropout.
    """
    operator = resolve(PRIVATE_NAMES[0])
    right = 0 if causal and window is not None else window
    debugs = False
    context: Tensor = operator(*operands, causal, debugs, window_size_left=window, window_size_right=right)[0]
    return context


def attention_operators() -> tuple[Any, Any, Any, Any]:
    """Return torch's operators of flash and of memory-efficient attention: forward, backward, forward, backward."""
    return (
        resolve(PRIVATE_NAMES[0]),
        resolve(PRIVATE_NAMES[7]),
        resolve(PRIVATE_NAMES[6]),
        resolve(PRIVATE_NAMES[8]),
    )


def efficient_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    """Run torch's memory-efficient attention on rectangles [R, N, L, D]; return the context."""
    context: Tensor = resolve(PRIVATE_NAMES[6])(q, k, v, bias, True, **options)[0]
    return context


def softmax_backward(gradient: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient of the scores, given the gradient of `weights`, their softmax over the last dimension."""
    found: Tensor = resolve(PRIVATE_NAMES[1])(gradient, weights, -1, weights.dtype)
    return found


def add_to_each(tensors: Sequence[Tensor], addends: Sequence[Tensor], factor: float) -> None:
    """Add factor * addends[i] to tensors[i], in place, with few kernel launches."""
    resolve(PRIVATE_NAMES[2])(tensors, addends, alpha=factor)


def copy_to_each(tensors: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy sources[i] to tensors[i], with few kernel launches."""
    resolve(PRIVATE_NAMES[10])(tensors, sources)


def multiply_each(tensors: Sequence[Tensor], factors: Sequence[float]) -> None:
    """Multiply tensors[i] by factors[i], in place, with few kernel launches."""
    resolve(PRIVATE_NAMES[11])(tensors, factors)


def sum_of_each(tensors: Sequence[Tensor], addends: Sequence[Tensor], factor: float) -> list[Tensor]:
    """Return tensors[i] + factor * addends[i], with few kernel launches."""
    return list(resolve(PRIVATE_NAMES[12])(tensors, addends, alpha=factor))


def norm_of_each(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the Frobenius norm of each tensor, with few kernel launches."""
    return list(resolve(PRIVATE_NAMES[13])(tensors))


def fused_adamw(*operands: Any, **settings: Any) -> None:
    """Update tensors in place with torch's fused AdamW kernel.

    `operands`: lists of tensors, gradients, first and second moments, an empty list, and update numbers. The kernel
    only reads the update numbers, so all tensors may share one.
    """
    resolve(PRIVATE_NAMES[14])(*operands, **settings, amsgrad=False, maximize=False)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors in a tree of nested containers."""
    return [leaf for leaf in resolve(PRIVATE_NAMES[3])(tree) if isinstance(leaf, Tensor)]


def dispatch_mode_class() -> Any:
    """Return torch's `TorchDispatchMode`, whose contexts intercept every operation."""
    return resolve(PRIVATE_NAMES[4])


def fake_tensor_module() -> Any:
    """Return torch's module of fake tensors, which have a shape and a device but no data."""
    return resolve(PRIVATE_NAMES[9])


def skip_compiler(mode: type) -> type:
    """Class decorator: let a dispatch mode run without importing torch's compiler; see `skip_compiler_import`."""
    plain = vars(mode)["__torch_dispatch__"]
    plain = getattr(plain, "__wrapped__", plain)
    vars(plain).setdefault("__dynamo_disable", plain)
    return mode


def nccl_backends() -> list[Any]:
    """Return the NCCL backend of each process group of this process, including DeepSpeed's groups."""
    if not (dist.is_initialized() and dist.is_nccl_available()):
        return []
    try:
        known = list(resolve(PRIVATE_NAMES[5]).pg_map)  # copied, because another thread may add a group
        groups = [group for group in known if dist.get_backend(group) == "nccl"]
        found = [group._get_backend(torch.device("cuda")) for group in groups]
        for backend in found:
            _ = backend.abort, backend.get_error
    except AttributeError as error:
        raise library_changed("torch", str(error)) from error
    return found


def mark_dynamic(tensor: Tensor) -> None:
    """Tell the compiler that the size of the tensor's first dimension varies."""
    resolve(COMPILER_NAMES[0])(tensor, 0)


def distinct_sizes() -> AbstractContextManager[None]:
    """Return a context in which the compiler does not assume that sizes which are equal now are always equal."""
    resolve(COMPILER_NAMES[3])
    patch: AbstractContextManager[None] = resolve(COMPILER_NAMES[2])(use_duck_shape=False)
    return patch


def limit_graphs(max_graphs: int) -> None:
    """Limit the graphs per function in this process. Torch before 2.12 has no option of `torch.compile` for this."""
    resolve(COMPILER_NAMES[4])
    resolve("_dynamo.config").recompile_limit = max_graphs


def skip_compiler_import() -> None:
    """Let optimizers be created and used without importing torch's compiler.

    Torch wraps `WRAPPED_METHODS` to keep its compiler from tracing them, and the first call imports the compiler: 1.4 s
    at each start, and 440 MB for Triton. No compiled code calls these methods here. If a release of torch wraps them
    differently, the compiler is imported again, and a test fails.
    """
    for name in WRAPPED_METHODS:
        plain = getattr(getattr(torch.optim.Optimizer, name, None), "__wrapped__", None)
        if plain is not None:
            vars(plain).setdefault("__dynamo_disable", plain)


def discard_graphs() -> None:
    """Discard all compiled graphs of this process, and reset their count."""
    torch.compiler.reset()
    resolve(COMPILER_NAMES[1]).clear()


def compiled_graph_count() -> int:
    """Return the number of graphs that this process has compiled."""
    return int(resolve(COMPILER_NAMES[1])["stats"]["unique_graphs"])
