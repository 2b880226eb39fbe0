"""The pieces of a layer before and after its attention kernels, which torch's compiler can compile.

A compiled layer is not one graph: an attention kernel needs the bounds of rows, which are numbers on the host that
differ from batch to batch. So a layer's forward pass calls the kernel between compiled pieces. A piece takes tensors
whose first dimension is the number of tokens (or queries), and dropout draws that were made before. It depends on no
row bounds and no random state, and has no graph breaks, so one graph serves any number of tokens. Single matrix
products are not made into pieces.
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
"""The draw (`Dropout.next_draw`) of each dropout of a piece, in order."""

_MIN_COMPILED_TOKENS = 2  # torch would compile separate graphs for 0 and 1 tokens; these run uncompiled
_SAVED_HOOKS = "AUTOGRAD_SAVED_TENSORS_HOOKS"  # the compiler's name for guards on saved-tensor hooks
_MAX_GRAPHS = 32  # largest number of graphs of a piece: for several widths, and for training and evaluation
_GRAPH_LIMITS = {"recompile_limit": _MAX_GRAPHS, "isolate_recompiles": True}
_SUPPORTED_LIMITS = _GRAPH_LIMITS.keys() & signature(torch.compile).parameters.keys()
"""The limits that the installed torch's compiler supports: 2.11 none, 2.12 the first, 2.13 both."""

Result = TypeVar("Result")
Function = Callable[..., Any]


class PieceWise(nn.Module):
    """A layer made of pieces. If `compiled` is set, the pieces run compiled, else as plain Python."""

    compiled: "Pieces | None" = None


Layer = TypeVar("Layer", bound=PieceWise)


def piece(function: Callable[Concatenate[Layer, ...], Result]) -> Callable[Concatenate[Layer, ...], Result]:
    """Make a method a piece of its layer. The first dimension of its first argument must be the number of tokens."""

    @wraps(function)
    def run_compiled_or_plain(layer: Layer, *inputs: Any) -> Result:
        if layer.compiled is None or len(inputs[0]) < _MIN_COMPILED_TOKENS:
            return function(layer, *inputs)
        made: Result = layer.compiled.run_piece(function, layer, *inputs)
        return made

    return run_compiled_or_plain


class Pieces:
    """The compiled pieces of a process, shared by all layers; a process has one such object.

    Until `close`, a call compiles the graph that it needs. After `close`, graphs that have not been compiled run as
    plain Python. So the computation of a step depends only on what was compiled before the first step, not on earlier
    steps. `backend`: torch.compile's backend; tests use faster ones.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self._open = True
        self._made: dict[Function, Function] = {}
        torch.compiler.set_stance("default")
        if "recompile_limit" not in _SUPPORTED_LIMITS:
            limit_graphs(_MAX_GRAPHS)

    def run_piece(self, function: Function, layer: nn.Module, *inputs: Any) -> Any:
        """Run `function`, a piece of `layer`, compiled, on the inputs."""
        if not self._open:
            return self._compile_once(function)(layer, *inputs)
        for tensor in tensors_in(inputs):
            if tensor.ndim:
                mark_dynamic(tensor)
        with distinct_sizes():
            return self._compile_once(function)(layer, *inputs)

    def close(self) -> None:
        """Stop compiling in this process. Graphs that are compiled stay in use."""
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
    """Let the layers of `model` run with the compiled `pieces`; None: as plain Python."""
    for module in model.modules():
        if isinstance(module, PieceWise):
            module.compiled = pieces


def _guards_to_keep(guards: Sequence[Any]) -> list[bool]:
    """Return which of the compiler's guards to keep.

    Dropped are guards on how modules and ZeRO store parameters (those on the tensors themselves are kept), on torch's
    own functions, which ZeRO replaces, and on saved-tensor hooks, which act on compiled code in any case.
    """
    return [
        guard.guard_type == "TENSOR_MATCH"
        or not ("._parameters" in guard.name or guard.is_global or guard.guard_type == _SAVED_HOOKS)
        for guard in guards
    ]
