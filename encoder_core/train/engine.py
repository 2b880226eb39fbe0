"""The DeepSpeed engine behind a small interface: forward, backward, update, and reading and restoring its state.

This is the only file that imports deepspeed. It runs ZeRO 0-3 in fp32 and bf16, on a GPU (NCCL) or a CPU (gloo).
"""

import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# On import DeepSpeed probes accelerators to choose one, but without a GPU a process must not initialise CUDA.
if "DS_ACCELERATOR" not in os.environ and not torch.cuda.is_available():
    os.environ["DS_ACCELERATOR"] = "cpu"

# DeepSpeed's autotuner would import mlflow if installed, which takes seconds on every rank, so mlflow is hidden.
if "mlflow" not in sys.modules:
    sys.modules["mlflow"] = None  # type: ignore[assignment]

# DeepSpeed imports Triton even on a CPU, only to see whether it is installed, which takes 440 MB. So it is hidden.
if "triton" not in sys.modules and not torch.cuda.is_available():
    sys.modules["triton"] = None  # type: ignore[assignment]

import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import set_z3_leaf_module

from encoder_core.batch import Batch
from encoder_core.errors import TrainingError
from encoder_core.layers import torch_internals
from encoder_core.layers.pieces import PieceWise
from encoder_core.objectives.modules.teacher import frozen_weights
from encoder_core.optim.average import AVERAGE, WeightAverage
from encoder_core.optim.muon import Muon
from encoder_core.optim.shards import ShardedOptimizer, ShardSegment
from encoder_core.optim.updates import ALL_PARAMETERS, UPDATE_GROUP, set_update
from encoder_core.train import deepspeed_internals, zero_state
from encoder_core.train.deepspeed_internals import resolve
from encoder_core.train.groups import abort_groups, leaving_groups
from encoder_core.train.overlap import GradientSequencer, OverlappedSums
from encoder_core.train.settings import EngineConfig
from encoder_core.train.timing import Stopwatch
from encoder_core.train.weight_check import ReplicatedWeights
from encoder_core.train.zero_state import Fragment, FrozenRange, NamedParameter, OwnedRange

with suppress(ModuleNotFoundError):  # some releases of DeepSpeed lack this module
    import_module("deepspeed.ops.triton_ops")  # imported now, while Triton is hidden
for _name in ("mlflow", "triton"):
    if sys.modules.get(_name, sys) is None:
        del sys.modules[_name]

deepspeed_internals.skip_unused_setup(deepspeed)
torch_internals.skip_compiler_import()
# DeepSpeed calls collectives by deprecated names, and resets torch's record of the warnings that it has shown: at ZeRO
# 3 every rank would print some warnings in each step.
warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}  # by `Precision`


@dataclass(frozen=True)
class Update:
    """The outcome of one update: whether it was applied, and the global gradient norm before clipping."""

    applied: bool
    grad_norm: float


class Engine:
    """A model and its optimizer under DeepSpeed.

    A step may have several updates (update groups), which DeepSpeed does not support itself. Each changes the parameter
    groups with its name; other parameters keep their weights and moments, and do not count in its gradient norm.

    Attributes:
        update_groups: names of the update groups, in order.
        own_kinds: kinds of state (`Fragment`), by name, of parameters whose kinds differ from `zero_state.state_kinds`.
        objective: the model.
        average: the average of the weights; None if `decay` is None.
        forwards: stopwatch of forward passes.
        replicated: weights that must be equal on all ranks.

    `decay`: decay of the average of the weights; None: no average is kept.

    Raises:
        TrainingError: the precision is bf16 at stage 0, where DeepSpeed has no fp32 gradient sums.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: EngineConfig,
        decay: float | None = None,
    ) -> None:
        if config.precision == "bf16" and config.stage == 0:
            raise TrainingError(
                "precision bf16 with zero 0 is not supported: DeepSpeed would keep no fp32 gradient sums there",
                remedy="set zero: 1 (the default), or precision: fp32",
            )
        self.names = {id(p): name for name, p in model.named_parameters()}
        self.shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        averaged = decay is not None
        self.own_kinds = zero_state.own_kinds(model, muon=isinstance(optimizer, Muon), averaged=averaged)
        self._kinds = zero_state.state_kinds(averaged=averaged)
        self.config = config
        self.objective = model
        self._movable: dict[str, list[nn.Parameter]] = {}  # trained parameters, by update group
        for group in optimizer.param_groups:
            self._movable.setdefault(group.get(UPDATE_GROUP, ALL_PARAMETERS), []).extend(group["params"])
        self.update_groups = tuple(self._movable)
        trained = {id(p) for params in self._movable.values() for p in params}
        self._frozen = {id(p) for p in model.parameters()} - trained
        for _, weight in frozen_weights(model):  # not in `model.parameters()`, so DeepSpeed does not convert them
            weight.data = weight.data.to(DTYPES[config.precision])
        if config.stage == 3:
            _gather_whole_layers(model)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config.deepspeed_config(), dist_init_required=False
        )
        self.layout = deepspeed_internals.layout(config.stage, config.precision)
        self._optimizer = resolve(self._engine, "optimizer")
        self.device = torch.device(get_accelerator().current_device_name())
        self.world = resolve(self._engine, "world_size")
        self.rank = resolve(self._engine, "global_rank")
        self._largest_norm = math.inf
        self._guard_updates()
        if config.stage == 3:
            deepspeed_internals.sum_gradients(self._optimizer)
        self._order = GradientSequencer(self._optimizer, list(model.parameters())) if config.stage > 1 else None
        self._overlapped = self._overlap_reduction() if self.world > 1 and config.has_separate_fp32_sums else None
        self.forwards = Stopwatch(self.device)
        self.replicated = self._replicated_weights()
        if config.stage > 0:
            self._describe_partitions(optimizer)
        self.average = None if decay is None else WeightAverage(decay, self._master_tensors(), optimizer.state)

    def close(self) -> None:
        """Release the hooks and the state that DeepSpeed holds. The engine cannot be used afterwards."""
        self._engine.destroy()

    def __call__(self, batch: Batch, memory: tuple[Tensor, ...] = ()) -> Any:
        """Run the module's forward pass with ZeRO's hooks. `memory`: the memory that the module returned before."""
        idle = not batch.tokens.numel()  # forward passes without tokens are not timed
        with nullcontext() if idle else self.forwards:
            return self._engine(batch, memory) if memory else self._engine(batch)

    def set_training(self, mode: bool) -> None:
        """Switch the model to training mode, with dropout, or to evaluation mode."""
        self._engine.train(mode)

    def begin_update_group(self, update_group: str) -> None:
        """Enter training mode, and enable gradients only for the parameters of this update group."""
        self.set_training(True)
        # With requires_grad off, DeepSpeed takes a gradient of 0; otherwise it would use the parameter's last gradient.
        if len(self.update_groups) > 1:
            for name, params in self._movable.items():
                for p in params:
                    p.requires_grad_(name == update_group)

    def backward(self, loss: Tensor, *, last: bool) -> None:
        """Accumulate the gradient of `loss`, a microbatch's contribution to the step's global loss. `last`: whether the
        microbatch is the rank's last in this update.
        """
        self._engine.set_gradient_accumulation_boundary(last)
        if last and self._overlapped is not None:
            self._overlapped.begin_last_pass()
        if self._order is not None:
            self._order.begin_pass()
        self._engine.backward(loss, scale_wrt_gas=False)
        if self._order is not None:
            self._order.ensure_ended()
        if last and self._overlapped is not None:
            self._overlapped.ensure_ended()

    def update(
        self, lr: float, count: int, update_group: str = ALL_PARAMETERS, largest_norm: float = math.inf
    ) -> Update:
        """Update the weights of `update_group` with the accumulated gradient. `count`: number of the update, from 1.

        The update is skipped if the gradient is not finite, or its norm exceeds `largest_norm`.
        """
        set_update(resolve(self._engine, "basic_optimizer"), lr=lr, count=count, update_group=update_group)
        self._largest_norm = largest_norm
        update = self._update_unsharded() if self.config.stage == 0 else self._update_sharded()
        if update.applied and self.average is not None:
            self.average.update_average(update_group)
        return update

    def _update_sharded(self) -> Update:
        self._engine.step()
        norm = float(self._engine.get_global_grad_norm() or 0.0)
        return Update(bool(self._engine.was_step_applied()) and norm <= self._largest_norm, norm)

    def _update_unsharded(self) -> Update:
        """Update at stage 0, where DeepSpeed neither computes the gradient norm nor skips updates that are not finite.
        Both are done here, with the reduced gradients.
        """
        gradients = [p.grad for p in self.objective.parameters() if p.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients))
        if not math.isfinite(norm) or norm > self._largest_norm:
            self._engine.zero_grad()
            return Update(False, norm)
        self._engine.step()
        return Update(True, norm)

    def _guard_updates(self) -> None:
        """Wrap the optimizer's `step` so that it skips updates whose gradient norm exceeds the limit.

        DeepSpeed itself has no such limit, but computes the norm before it calls the optimizer.
        """
        optimizer = resolve(self._engine, "basic_optimizer")
        unlimited_step = optimizer.step

        def step_within_limit() -> None:
            limited = self.config.stage > 0 and self._largest_norm < math.inf
            if not limited or deepspeed_internals.gradient_norm(self._optimizer) <= self._largest_norm:
                unlimited_step()

        optimizer.step = step_within_limit

    def _overlap_reduction(self) -> OverlappedSums:
        """Stage 1 in bf16: let `OverlappedSums` replace DeepSpeed's reduction after the last backward pass."""
        optimizer, parameters = self._optimizer, list(self.objective.parameters())
        sums = deepspeed_internals.fp32_gradient_sums(optimizer)
        overlapped = OverlappedSums(sums, parameters, DTYPES[self.config.reduce_dtype], self.config.bucket)
        deepspeed_internals.replace_method(self._engine, "buffered_allreduce_fallback", lambda **_: overlapped.finish())
        return overlapped

    def _describe_partitions(self, optimizer: torch.optim.Optimizer) -> None:
        """Describe this rank's flat partitions to an optimizer that needs whole parameters. For other optimizers only
        DeepSpeed's private names are looked up, so that a rehearsal notices if one is missing."""
        flats = deepspeed_internals.flat_tensors(self._optimizer, self.layout)
        if not isinstance(optimizer, ShardedOptimizer):
            return
        ranges = {r.name: r for r in self._trained_ranges(self.rank, self.world)}
        numbers = {name: number for number, name in enumerate(self.shapes)}

        def segment(name: str) -> ShardSegment:
            number, owned = numbers[name], ranges.get(name)
            if owned is None:
                return ShardSegment(number, 0, 0, 0)
            part = owned.part
            return ShardSegment(number, part.start, part.offset, part.offset + part.length)

        segments = {flat: [segment(self.names[id(p)]) for p in params] for flat, params in flats}
        optimizer.shard(segments, list(self.shapes.values()))

    def fragments(self) -> Iterator[Fragment]:
        """Yield the ranges of fp32 state that this rank owns, as views, which the next update changes."""
        for owned in self._trained_ranges(self.rank, self.world):
            yield owned.fragment()
        for frozen in self._frozen_ranges(self.rank, self.world):
            yield frozen.fragment()

    def _replicated_weights(self) -> ReplicatedWeights:
        """Return the weights of which every rank has a copy: the working weights at stages 0 to 2, and the weights of
        frozen networks at every stage.
        """
        teachers = frozen_weights(self.objective)
        if self.config.stage == 3:
            return ReplicatedWeights([weight for _, weight in teachers], teachers)
        named = [(name, p) for name, p, _ in self._named_parameters()]
        weights = [p for _, p in named]
        frozen = [p for p in weights if id(p) in self._frozen]
        buffers = zero_state.working_buffers(self._optimizer, weights, frozen, self.layout)
        return ReplicatedWeights([*buffers, *(weight for _, weight in teachers)], [*named, *teachers])

    def restore(self, restored_kinds: Iterable[str], read: zero_state.ReadRange) -> None:
        """Overwrite all state that this rank holds with `read(name, kind, start, stop)`, then rebuild working weights.

        `restored_kinds`: kinds of state to restore, as far as a parameter has them: only "master" to start from
        weights, `zero_state.ALL_KINDS` to resume. If the average is not restored, it is reset to the weights.
        """
        kinds = tuple(restored_kinds)
        for held in self._held_ranges():
            held.restore(kinds, read)
        if self.average is not None and AVERAGE not in kinds:
            self.average.reset_to_weights()
        # At stages 0 to 2 every rank holds frozen parameters whole.
        rank_and_world = (0, 1) if self.config.stage < 3 else (self.rank, self.world)
        for frozen in self._frozen_ranges(*rank_and_world):
            frozen.restore(kinds, read)
        deepspeed_internals.rebuild_working_weights(self._optimizer, self.layout)

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Inside the block, the model computes with the average of its weights, which the engine must keep. Collective.

        After the block it has its weights back, bit for bit. After an error in the block it does not: restoring weights
        needs all ranks, and the failed rank ends.
        """
        self._swap_average()
        yield
        self._swap_average()

    def _swap_average(self) -> None:
        """Exchange master weights and average, and rebuild the working weights."""
        assert self.average is not None
        self.average.swap_with_weights()
        deepspeed_internals.rebuild_working_weights(self._optimizer, self.layout)

    def _held_ranges(self) -> Iterator[OwnedRange]:
        """Yield the ranges of trained parameters that this rank holds: at stage 0 all parameters, whole."""
        return self._trained_ranges(0, 1) if self.config.stage == 0 else self._trained_ranges(self.rank, self.world)

    def _master_tensors(self) -> dict[str, list[Tensor]]:
        """Return this rank's tensors of master weights, by update group."""
        flats: dict[str, dict[int, Tensor]] = {group: {} for group in self._movable}
        groups = {self.names[id(p)]: group for group, params in self._movable.items() for p in params}
        for held in self._held_ranges():
            flats[groups[held.name]][id(held.part.flat)] = held.part.flat
        return {group: list(its.values()) for group, its in flats.items()}

    def _trained_ranges(self, rank: int, world: int) -> Iterator[OwnedRange]:
        named = [named for named in self._named_parameters() if id(named.weight) not in self._frozen]
        return zero_state.owned_ranges(self._optimizer, self.layout, named, rank, world)

    def _frozen_ranges(self, rank: int, world: int) -> Iterator[FrozenRange]:
        named = [named for named in self._named_parameters() if id(named.weight) in self._frozen]
        return zero_state.frozen_ranges(self.config.stage, named, rank, world)

    def _named_parameters(self) -> list[NamedParameter]:
        names = [(self.names[id(p)], p) for p in self.objective.parameters()]
        return [NamedParameter(name, p, self.own_kinds.get(name, self._kinds)) for name, p in names]


def leave_groups(*, broken: bool = False) -> None:
    """Leave all process groups of this process, so that it can join others. Close the engine before.

    `broken`: whether a collective may be incomplete, because some ranks have failed; then it is aborted.
    """
    deepspeed_internals.reset_parameter_numbers(deepspeed)
    if broken:
        abort_groups()
    with leaving_groups():
        if deepspeed.comm.is_initialized():
            deepspeed.comm.destroy_process_group()
        elif dist.is_initialized():
            dist.destroy_process_group()


def _gather_whole_layers(model: nn.Module) -> None:
    """Let stage 3 gather all parameters of a compiled layer when the layer is called. Compiled code does not call the
    layer's modules, at which stage 3 would gather otherwise.
    """
    for module in model.modules():
        if isinstance(module, PieceWise) and module.compiled is not None:
            set_z3_leaf_module(module, True)
