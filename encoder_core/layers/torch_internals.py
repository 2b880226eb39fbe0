"""Every private name of torch that we use; no other file uses any.

Each is looked up where it is used, and `LibraryChanged` is raised if a release of torch has renamed it.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from encoder_core.errors import library_changed

PRIVATE_NAMES = (
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
"""Private names that exist only once torch's compiler is imported."""

WRAPPED_METHODS = ("add_param_group", "zero_grad", "state_dict", "load_state_dict")
"""Methods of torch's optimizers whose first call imports the compiler."""


def resolve(path: str) -> Any:
    """Return the object at this dotted path in torch.

    Raises:
        LibraryChanged: torch has nothing there.
    """
    found: Any = torch
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            raise library_changed("torch", path) from error
    return found


def flash_attention(*operands: Any, window: int | None, causal: bool) -> Tensor:
    """Return the context of the operator beneath `torch.nn.attention.varlen.varlen_attn`.

    `operands`: query, key, value, bounds and lengths of rows, dropout.
    """
    operator = resolve(PRIVATE_NAMES[0])
    right = 0 if causal and window is not None else window
    debugs = False
    context: Tensor = operator(*operands, causal, debugs, window_size_left=window, window_size_right=right)[0]
    return context


def attention_operators() -> tuple[Any, Any, Any, Any]:
    """Return torch's operators of flash attention and its gradient, and of memory-efficient attention and its."""
    return (
        resolve(PRIVATE_NAMES[0]),
        resolve(PRIVATE_NAMES[7]),
        resolve(PRIVATE_NAMES[6]),
        resolve(PRIVATE_NAMES[8]),
    )


def efficient_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, **options: Any) -> Tensor:
    """Return the context of torch's memory-efficient attention on rectangles [R, N, L, D]."""
    context: Tensor = resolve(PRIVATE_NAMES[6])(q, k, v, bias, True, **options)[0]
    return context


def softmax_backward(gradient: Tensor, weights: Tensor) -> Tensor:
    """Return the gradient by the scores, where `weights` are their softmax over the last dimension."""
    found: Tensor = resolve(PRIVATE_NAMES[1])(gradient, weights, -1, weights.dtype)
    return found


def add_to_each(tensors: Sequence[Tensor], addends: Sequence[Tensor], factor: float) -> None:
    """Add factor * others[i] to tensors[i], in place, with few kernels."""
    resolve(PRIVATE_NAMES[2])(tensors, addends, alpha=factor)


def copy_to_each(tensors: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy others[i] to tensors[i], with few kernels."""
    resolve(PRIVATE_NAMES[10])(tensors, sources)


def multiply_each(tensors: Sequence[Tensor], factors: Sequence[float]) -> None:
    """Multiply tensors[i] by factors[i], in place, with few kernels."""
    resolve(PRIVATE_NAMES[11])(tensors, factors)


def sum_of_each(tensors: Sequence[Tensor], addends: Sequence[Tensor], factor: float) -> list[Tensor]:
    """Return tensors[i] + factor * others[i], with few kernels."""
    return list(resolve(PRIVATE_NAMES[12])(tensors, addends, alpha=factor))


def norm_of_each(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the Frobenius norm of each tensor, with few kernels."""
    return list(resolve(PRIVATE_NAMES[13])(tensors))


def fused_adamw(*operands: Any, **settings: Any) -> None:
    """Update tensors by torch's kernel of AdamW. It reads the number of the update, so tensors may share one.

    `operands`: lists of tensors, gradients and both moments, an empty list, and the number of each tensor's update.
    """
    resolve(PRIVATE_NAMES[14])(*operands, **settings, amsgrad=False, maximize=False)


def tensors_in(tree: Any) -> list[Tensor]:
    """Return all tensors in nested containers."""
    return [leaf for leaf in resolve(PRIVATE_NAMES[3])(tree) if isinstance(leaf, Tensor)]


def dispatch_mode_class() -> Any:
    """Return the class of contexts that see every operation."""
    return resolve(PRIVATE_NAMES[4])


def fake_tensor_module() -> Any:
    """Return the module of tensors that have a device and no numbers."""
    return resolve(PRIVATE_NAMES[9])


def skip_compiler(mode: type) -> type:
    """Let a dispatch mode be used without importing torch's compiler, as in `skip_compiler_import`."""
    plain = vars(mode)["__torch_dispatch__"]
    plain = getattr(plain, "__wrapped__", plain)
    vars(plain).setdefault("__dynamo_disable", plain)
    return mode


def nccl_backends() -> list[Any]:
    """Return the NCCL part of each process group of this process, those of DeepSpeed among them."""
    if not (dist.is_initialized() and dist.is_nccl_available()):
        return []
    try:
        known = list(resolve(PRIVATE_NAMES[5]).pg_map)  # another thread may add one
        groups = [group for group in known if dist.get_backend(group) == "nccl"]
        found = [group._get_backend(torch.device("cuda")) for group in groups]
        for backend in found:
            _ = backend.abort, backend.get_error
    except AttributeError as error:
        raise library_changed("torch", str(error)) from error
    return found


def mark_dynamic(tensor: Tensor) -> None:
    """Tell the compiler that the first dimension varies."""
    resolve(COMPILER_NAMES[0])(tensor, 0)


def distinct_sizes() -> AbstractContextManager[None]:
    """Return a context in which the compiler does not treat two sizes as the same just because they are equal now."""
    resolve(COMPILER_NAMES[3])
    patch: AbstractContextManager[None] = resolve(COMPILER_NAMES[2])(use_duck_shape=False)
    return patch


def limit_graphs(max_graphs: int) -> None:
    """Limit the graphs of one function in this process; before torch 2.12, `torch.compile` has no option for it."""
    resolve(COMPILER_NAMES[4])
    resolve("_dynamo.config").recompile_limit = max_graphs


def skip_compiler_import() -> None:
    """Let optimizers be made and used without importing torch's compiler.

    Torch wraps `WRAPPED_METHODS` so that their first call imports the compiler, only to keep it from tracing them:
    1.4 s a start, and the 440 MB of Triton's library. No compiled code calls them here. A release of torch that wraps
    them otherwise imports the compiler again, and a test fails.
    """
    for name in WRAPPED_METHODS:
        plain = getattr(getattr(torch.optim.Optimizer, name, None), "__wrapped__", None)
        if plain is not None:
            vars(plain).setdefault("__dynamo_disable", plain)


def discard_graphs() -> None:
    """Discard what was compiled in this process, and reset its count."""
    torch.compiler.reset()
    resolve(COMPILER_NAMES[1]).clear()


def compiled_graph_count() -> int:
    """Return how many graphs this process has compiled."""
    return int(resolve(COMPILER_NAMES[1])["stats"]["unique_graphs"])
