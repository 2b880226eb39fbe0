"""The pieces of a layer between its attention kernels, which torch's compiler may join into few kernels.

A compiled layer is not one graph: an attention kernel needs the rows, which are numbers on the host that differ from
batch to batch. So a layer's forward pass calls the kernel between pieces. A piece takes tensors whose first dimension
is places (tokens, queries), and draws of dropout that were made before. It has no rows, no random state and no graph
break, so one graph serves any number of places. A single matrix product is in no piece.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, Concatenate, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor, nn

from encoder_core.layers.torch_internals import distinct_sizes, limit_graphs, mark_dynamic, tensors_in

DropoutDraws = Sequence[Int[Tensor, ""] | None]
"""Draws of dropout, one for each dropout of a piece, in order (`Dropout.next_draw`)."""

_MIN_DYNAMIC_PLACES = 2  # for 0 and 1 places torch would compile separate graphs, which is not worth the time
_SAVED_HOOKS = "AUTOGRAD_SAVED_TENSORS_HOOKS"
_MAX_GRAPHS = 32  # most graphs of a piece: for networks of several widths, training and evaluation
_GRAPH_LIMITS = {"recompile_limit": _MAX_GRAPHS, "isolate_recompiles": True}
_SUPPORTED_LIMITS = _GRAPH_LIMITS.keys() & signature(torch.compile).parameters.keys()
"""The limits that this torch's compiler supports: 2.11 none, 2.12 the first, 2.13 both."""

Result = TypeVar("Result")
Function = Callable[..., Any]


class PieceWise(nn.Module):
    """A layer made of pieces. `compiled`, if set, computes them."""

    compiled: "Pieces | None" = None


Layer = TypeVar("Layer", bound=PieceWise)


def piece(function: Callable[Concatenate[Layer, ...], Result]) -> Callable[Concatenate[Layer, ...], Result]:
    """Make a method a piece of its layer. The first dimension of its first argument is the number of places."""

    @wraps(function)
    def run_compiled_or_plain(layer: Layer, *inputs: Any) -> Result:
        if layer.compiled is None or len(inputs[0]) < _MIN_DYNAMIC_PLACES:
            return function(layer, *inputs)
        made: Result = layer.compiled.run_piece(function, layer, *inputs)
        return made

    return run_compiled_or_plain


class Pieces:
    """Compiled pieces, shared by the layers of a process; a process has one such object.

    Until `close`, a call compiles what it needs. After that, what has not been compiled runs as Python. So the
    computation of a step depends on what was compiled before the first step, not on the steps that were taken.
    `backend` is that of torch.compile; tests use faster ones.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self._open = True
        self._made: dict[Function, Function] = {}
        torch.compiler.set_stance("default")
        if "recompile_limit" not in _SUPPORTED_LIMITS:
            limit_graphs(_MAX_GRAPHS)

    def run_piece(self, function: Function, layer: nn.Module, *inputs: Any) -> Any:
        """Return the result of `function`, a piece of `layer`, for the inputs."""
        if not self._open:
            return self._compile_once(function)(layer, *inputs)
        for tensor in tensors_in(inputs):
            if tensor.ndim:
                mark_dynamic(tensor)
        with distinct_sizes():
            return self._compile_once(function)(layer, *inputs)

    def close(self) -> None:
        """Compile nothing from now on in this process."""
        self._open = False
        torch.compiler.set_stance("eager_on_recompile")

    def _compile_once(self, function: Function) -> Function:
        if function not in self._made:
            self._made[function] = torch.compile(  # type: ignore[call-overload]
                function,
                fullgraph=True,
                backend=self._backend,
                options={"guard_filter_fn": _guards_to_keep},
                **{name: _GRAPH_LIMITS[name] for name in _SUPPORTED_LIMITS},
            )
        return self._made[function]


def compile_layers(model: nn.Module, pieces: Pieces | None) -> None:
    """Compute the layers of `model` by the compiled `pieces` from now on. If `pieces` is None, Python computes them."""
    for module in model.modules():
        if isinstance(module, PieceWise):
            module.compiled = pieces


def _guards_to_keep(guards: Sequence[Any]) -> list[bool]:
    """Return which guards to keep: of parameters only the tensors, not how modules and ZeRO store them.

    Guards on torch's own functions, which ZeRO replaces, are dropped, and so are those on hooks for saved tensors,
    because these hooks also act on what compiled code saves.
    """
    return [
        guard.guard_type == "TENSOR_MATCH"
        or not ("._parameters" in guard.name or guard.is_global or guard.guard_type == _SAVED_HOOKS)
        for guard in guards
    ]
