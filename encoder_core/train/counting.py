"""Counts the FLOPs and the memory of one microbatch by running the module on tensors without data.

The tensors have only shapes and dtypes. For a GPU they are on torch's meta device, where layers take the same path as
on a GPU, except that our kernels are not launched (`encoder_core/layers/planned.py`). For a CPU they are torch's fake
tensors, but integers of the batch stay real, because CPU kernels read the bounds of rows. So model families and
objectives need no code for their cost.

FLOPs are those of matrix products and convolutions, as torch.utils.flop_counter counts them; attention is counted by
`planned.py`. Everything else (LayerNorm, softmax, dropout) is a few percent of the arithmetic.

`count_passes` also measures passes on real tensors; a test compares both counts.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from encoder_core.batch import Batch
from encoder_core.layers.initialise import on_meta
from encoder_core.layers.planned import collect_flops, flop_formulas, planned_for_gpu
from encoder_core.layers.torch_internals import dispatch_mode_class, fake_tensor_module, skip_compiler, tensors_in
from encoder_core.objectives.modules.losses import CoupledObjective, LossSums, ObjectiveModule
from encoder_core.train.exchange import RankExamples
from encoder_core.train.zero_memory import Device, PassBytes


@dataclass(frozen=True)
class PassCost:
    """The cost of one microbatch; FLOPs are summed over the update groups.

    Attributes:
        forward: FLOPs of the forward pass.
        model: FLOPs of forward and backward pass.
        first_pass: FLOPs of a coupled objective's first pass, which has no gradients; 0 for other objectives.
        bytes: memory of each update group's passes; most objectives have one group.
    """

    forward: int
    model: int
    first_pass: int
    bytes: tuple[PassBytes, ...]


def count_module_passes(
    build: Callable[[], ObjectiveModule], batch: Batch, dtype: torch.dtype, device: Device
) -> PassCost:
    """Count the passes, in training and in precision `dtype`, of the module that `build` returns. This machine need
    not have a device of this kind.

    `batch` is on the host. Modules with memory (XLNet) are counted with full memory.
    """
    if device == "cuda":
        with planned_for_gpu():
            with on_meta(), _default_dtype(dtype):
                module = build().train()
            return count_passes(module, batch.to(torch.device("meta")))
    with fake_tensor_module().FakeTensorMode(allow_non_fake_inputs=True):
        with _default_dtype(dtype):
            module = build().train()
        with _RealIntegers():
            return count_passes(module, batch)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def count_passes(module: ObjectiveModule, batch: Batch) -> PassCost:
    """Run the forward and backward passes of one microbatch, and return their cost. Gradients are discarded."""
    with _Meter() as first, torch.no_grad():
        memory = _couple_alone(module, batch) if isinstance(module, CoupledObjective) else ()
    groups = list(module.update_groups())
    found = _group_passes(module, batch, memory)
    if len(groups) == 1 and not memory:
        while found[-1].memory and _tensor_shapes(found[-1].memory) != _tensor_shapes(
            memory
        ):  # repeat until XLNet's memory is full, that is, stops growing
            memory = found[-1].memory
            found = [_run_pass(module, batch, memory)]
    return PassCost(
        forward=sum(one.forward for one in found),
        model=sum(one.both for one in found),
        first_pass=first.flops,
        bytes=tuple(one.bytes for one in found),
    )


@dataclass(frozen=True)
class _GroupPass:
    """One update group's passes: FLOPs of the forward pass and of both, bytes, and the memory that was returned."""

    forward: int
    both: int
    bytes: PassBytes
    memory: tuple[Tensor, ...]


def _group_passes(module: ObjectiveModule, batch: Batch, memory: tuple[Tensor, ...]) -> list[_GroupPass]:
    """Run the passes of each update group in order; each gets the memory that the previous one returned."""
    found: list[_GroupPass] = []
    for _ in module.update_groups():
        found.append(_run_pass(module, batch, found[-1].memory if found else memory))
    return found


def _couple_alone(module: CoupledObjective, batch: Batch) -> tuple[Tensor, ...]:
    """Run a coupled objective's first pass as if `batch` were the global batch; return the second pass's memory."""
    everyone, own = RankExamples.from_one_microbatch(*module(batch).memory)
    return module.couple(own, everyone)


def _tensor_shapes(memory: Iterable[Tensor]) -> list[torch.Size]:
    return [tensor.shape for tensor in memory]


def _run_pass(module: ObjectiveModule, batch: Batch, memory: tuple[Tensor, ...]) -> _GroupPass:
    """Run and measure the forward and backward pass of one update group."""
    known = [*module.parameters(), *memory]
    apart = {id(tensor.untyped_storage()) for tensor in known}
    saved: dict[int, torch.UntypedStorage] = {}

    def note_saved_storage(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if id(storage) not in apart:
            saved.setdefault(id(storage), storage)  # a reference, so that no later storage gets the same id
        return tensor

    with _discarded_gradients(module), _Meter(known, tensors_in(vars(batch))) as meter:
        with torch.autograd.graph.saved_tensors_hooks(note_saved_storage, lambda tensor: tensor):
            losses: LossSums = module(batch, memory) if memory else module(batch)
        forward, kept = meter.flops, sum(storage.nbytes() for storage in saved.values())
        saved.clear()  # only the autograd graph still refers to these storages, and frees them in the backward pass
        torch.autograd.backward([term.loss_sum for term in losses.terms])
    return _GroupPass(forward, meter.flops, PassBytes(kept, meter.peak), losses.memory)


@contextmanager
def _discarded_gradients(module: nn.Module) -> Iterator[None]:
    """Discard each parameter's gradient as soon as it is computed; `zero_memory.py` counts gradients."""

    def discard(parameter: Tensor) -> None:
        parameter.grad = None

    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    hooks = [p.register_post_accumulate_grad_hook(discard) for p in trained]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@skip_compiler
class _Meter(dispatch_mode_class()):  # type: ignore[misc]
    """Counts FLOPs, and the current and largest number of bytes of the storages allocated inside the block.

    Args:
        known: tensors that do not count, such as parameters.
        given: tensors that count although they existed before the block.
    """

    def __init__(self, known: Iterable[Tensor] = (), given: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._operators = 0
        self._kernels: list[int] = []
        self._formulas = flop_formulas()
        self._known = {id(tensor.untyped_storage()): tensor for tensor in known}
        self._storages: dict[int, Any] = {}
        for tensor in given:
            self._note_allocated(tensor)

    @property
    def flops(self) -> int:
        return self._operators + sum(self._kernels)

    def __enter__(self) -> "_Meter":
        collect_flops(self._kernels)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        collect_flops(None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        formula = self._formulas.get(func.overloadpacket)
        if formula is not None:
            self._operators += formula(*args, **(kwargs or {}), out_val=out)
        for tensor in [out] if isinstance(out, Tensor) else tensors_in(out):
            self._note_allocated(tensor)
        return out

    def _note_allocated(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        if key in self._known or key in self._storages:
            return
        self._storages[key] = weakref.ref(storage, partial(self._note_freed, key, size))
        self.alive += size
        self.peak = max(self.peak, self.alive)

    def _note_freed(self, key: int, size: int, _: object) -> None:
        del self._storages[key]
        self.alive -= size


@skip_compiler
class _RealIntegers(dispatch_mode_class()):  # type: ignore[misc]
    """Inside fake mode, computes real results from real tensors, such as row bounds. Uninitialised ones stay fake."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, fakes = kwargs or {}, fake_tensor_module()
        given = tensors_in((args, options))
        if func is torch.ops.aten.empty.memory_format or any(isinstance(tensor, fakes.FakeTensor) for tensor in given):
            return func(*args, **options)
        with fakes.unset_fake_temporarily():
            return func(*args, **options)
