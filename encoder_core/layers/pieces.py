"""The pieces of a layer between its attention kernels, which torch's compiler may make few kernels of.

A compiled layer is not one graph: a kernel of attention knows of rows, and rows are numbers on the host that differ
from batch to batch. So a layer's forward pass calls the kernel between pieces. A piece takes tensors whose first
dimension is places (tokens, queries), and draws of dropout that were made before. So it holds no row, no random state
and no break, and one graph does for any number of places. What is a matrix product alone is in no piece.
"""

from collections.abc import Callable, Sequence
from functools import wraps
from inspect import signature
from typing import Any, Concatenate, TypeVar

import torch
from jaxtyping import Int
from torch import Tensor, nn

from encoder_core.layers.torch_internals import limit_graphs, mark_dynamic, sizes_apart, tensors_in

Draws = Sequence[Int[Tensor, ""] | None]
"""One for each dropout of a piece, in order (`Dropout.draw`)."""

_FEWEST = 2  # places: torch makes graphs of their own for none and for one, which are not worth a compilation
_SAVING = "AUTOGRAD_SAVED_TENSORS_HOOKS"
_MOST_GRAPHS = 32  # of a piece: networks that differ in width, training and evaluation
_LIMITS = {"recompile_limit": _MOST_GRAPHS, "isolate_recompiles": True}
_KNOWN = _LIMITS.keys() & signature(torch.compile).parameters.keys()
"""Which of them this torch's compiler takes: 2.11 none, 2.12 the first, 2.13 both."""

Result = TypeVar("Result")
Function = Callable[..., Any]


class PieceWise(nn.Module):
    """A layer made of pieces. Where `compiled` is set, it computes them."""

    compiled: "Pieces | None" = None


Layer = TypeVar("Layer", bound=PieceWise)


def piece(function: Callable[Concatenate[Layer, ...], Result]) -> Callable[Concatenate[Layer, ...], Result]:
    """A method that is a piece of its layer. Its first argument has the places that the others have, too."""

    @wraps(function)
    def run(layer: Layer, *inputs: Any) -> Result:
        if layer.compiled is None or len(inputs[0]) < _FEWEST:
            return function(layer, *inputs)
        made: Result = layer.compiled.run(function, layer, *inputs)
        return made

    return run


class Pieces:
    """Compiled pieces, shared by the layers of a process; a process has one of these.

    A call compiles what it needs until `close`. From then on what has not been compiled runs as Python. So what
    computes a step follows from what was compiled before the first one, and not from the steps that were taken.

    `backend`: of torch.compile; tests take quicker ones.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self._open = True
        self._made: dict[Function, Function] = {}
        torch.compiler.set_stance("default")
        if "recompile_limit" not in _KNOWN:
            limit_graphs(_MOST_GRAPHS)

    def run(self, function: Function, layer: nn.Module, *inputs: Any) -> Any:
        """What `function`, a piece of `layer`, makes of the inputs."""
        if not self._open:
            return self._of(function)(layer, *inputs)
        for tensor in tensors_in(inputs):
            if tensor.ndim:
                mark_dynamic(tensor)
        with sizes_apart():
            return self._of(function)(layer, *inputs)

    def close(self) -> None:
        """Compile nothing from here on, in this process."""
        self._open = False
        torch.compiler.set_stance("eager_on_recompile")

    def _of(self, function: Function) -> Function:
        if function not in self._made:
            self._made[function] = torch.compile(  # type: ignore[call-overload]
                function,
                fullgraph=True,
                backend=self._backend,
                options={"guard_filter_fn": _necessary},
                **{name: _LIMITS[name] for name in _KNOWN},
            )
        return self._made[function]


def compile_layers(model: nn.Module, pieces: Pieces | None) -> None:
    """From here on the layers of `model` compute by these; None: as Python."""
    for module in model.modules():
        if isinstance(module, PieceWise):
            module.compiled = pieces


def _necessary(guards: Sequence[Any]) -> list[bool]:
    """Of parameters the tensors, and not how modules and ZeRO keep them; nothing of torch's own functions, which ZeRO
    replaces; nor of hooks for what autograd saves, which act on what compiled code saves, too."""
    return [
        guard.guard_type == "TENSOR_MATCH"
        or not ("._parameters" in guard.name or guard.is_global or guard.guard_type == _SAVING)
        for guard in guards
    ]
