"""All uses of private or undocumented names of DeepSpeed.

If a release of DeepSpeed has renamed one, its use raises `LibraryChanged`. Before a rank builds its engine, a tiny
engine uses every name in a step, a save and a load (`rehearsal.py`). That the names still behave as expected is
checked there, and in each step by `overlap.py`. Methods are replaced only by `replace_method`, which never adds one.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from encoder_core.errors import library_changed

Layout = Literal["whole", "parts", "bf16", "shards"]
"""Layout of DeepSpeed's optimizer state. `whole`: stage 0. `parts`: stage 1 in fp32, and stage 2. `bf16`: stage 1 in
bf16. `shards`: stage 3."""

# Methods of the ZeRO 2 and 3 optimizers: one receives a parameter's gradient, one ends a backward pass.
REDUCERS = ("reduce_ready_partitions_and_remove_grads", "independent_gradient_partition_epilogue")


class FlatPart(NamedTuple):
    """A range of a parameter in a flat tensor: elements [start, start + length) of the flattened parameter are elements
    [offset, offset + length) of `flat`.
    """

    flat: Tensor
    start: int
    length: int
    offset: int

    @property
    def stop(self) -> int:
        return self.start + self.length

    def view(self, flat: Tensor) -> Tensor:
        """Return this range of a tensor with the layout of `self.flat`, as a view."""
        return flat.detach().view(-1).narrow(0, self.offset, self.length)


def layout(stage: int, precision: str) -> Layout:
    if stage == 0:
        return "whole"
    if stage == 3:
        return "shards"
    return "bf16" if (stage, precision) == (1, "bf16") else "parts"


def resolve(owner: Any, name: str) -> Any:
    """Return the attribute `name` of `owner`.

    Raises:
        LibraryChanged: there is no such attribute.
    """
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise library_changed("deepspeed", f"{type(owner).__name__}.{name}") from error


def replace_method(owner: Any, name: str, replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a method with `replacement`; return the former method."""
    before: Callable[..., Any] = resolve(owner, name)
    setattr(owner, name, replacement)
    return before


def skip_unused_setup(deepspeed: Any) -> None:
    """Prevent setup work of DeepSpeed that training does not need. Call it directly after importing DeepSpeed."""
    # On a CPU, DeepSpeed compiles a shared-memory reduction, which only inference uses, at the first start on a
    # machine. Training reduces through gloo, so the operator is marked as incompatible, and no machine needs a
    # compiler. On a GPU DeepSpeed has no such operator, and reading the table would probe every operator.
    if deepspeed.accelerator.get_accelerator().device_name() == "cpu":
        operators = resolve(deepspeed.ops, "__compatible_ops__")
        if "deepspeed_shm_comm" not in operators:
            raise library_changed("deepspeed", "ops.__compatible_ops__['deepspeed_shm_comm']")
        operators["deepspeed_shm_comm"] = False
    # Building an engine imports DeepSpeed's Muon, for which torch would compile unused kernels: 1.4 s at each start.
    compiler = resolve(resolve(deepspeed, "runtime"), "compiler")
    plain = resolve(compiler, "dummy_decorator")
    replace_method(compiler, "compile", lambda: plain)


def reset_parameter_numbers(deepspeed: Any) -> None:
    """Reset the counters by which stage 3 numbers parameters and modules, over all engines of a process. The numbers
    must be equal on all ranks, and some processes may have had an engine before while others have not.
    """
    init = resolve(resolve(deepspeed, "zero"), "Init")
    for counter in ("param_id", "num_persisted_parameters", "num_persisted_elements"):
        resolve(init, counter)
        setattr(init, counter, 0)
    offload = resolve(resolve(deepspeed.runtime.zero, "parameter_offload"), "DeepSpeedZeRoOffload")
    # DeepSpeed keeps the module count in a list that is an argument's default value, which all calls share.
    match resolve(offload, "_register_deepspeed_module").__defaults__:
        case ([int()] as count,):
            count[0] = 0
        case _:
            raise library_changed("deepspeed", "the count of modules in _register_deepspeed_module")


def sum_gradients(optimizer: Any) -> None:
    """Make stage 3 sum gradients over ranks, in `reduce_dtype`; DeepSpeed itself can only take the mean.

    Multiplying the loss by the number of ranks instead would round bf16 gradients differently, unless that number is a
    power of two.
    """
    replace_method(optimizer, "_gradient_averaging_world_size", lambda params, world: 1)


def gradient_norm(optimizer: Any) -> float:
    """Return the gradient norm of the current step, before clipping."""
    return float(resolve(optimizer, "_global_grad_norm"))


def fp32_gradient_sums(optimizer: Any) -> list[tuple[Tensor, Sequence[nn.Parameter]]]:
    """Stage 1 in bf16: return each parameter group's flat tensor of gradient sums, and its parameters in order."""
    flats, groups = resolve(optimizer, "fp32_groups_gradients_flat"), resolve(optimizer, "bf16_groups")
    return list(zip(flats, groups, strict=True))


def flat_tensors(optimizer: Any, kind: Layout) -> list[tuple[Tensor, list[nn.Parameter]]]:
    """Return the flat tensors that the optimizer updates, each with the parameters that lie in it on any rank.

    Tensors and parameters have the same order on all ranks.
    """
    groups = {"parts": "bit16_groups", "bf16": "bf16_groups", "shards": "fp16_groups"}[kind]
    return list(zip(_master_tensors(optimizer, kind), resolve(optimizer, groups), strict=True))


def _master_tensors(optimizer: Any, kind: Layout) -> list[Tensor]:
    names = {
        "parts": "single_partition_of_fp32_groups",
        "bf16": "fp32_groups_flat_partition",
        "shards": "fp32_partitioned_groups_flat",
    }
    found: list[Tensor] = resolve(optimizer, names[kind])
    return found


def working_flats(optimizer: Any, kind: Layout) -> list[Tensor]:
    """Stages 1 and 2: return the tensors that hold the working weights of each parameter group."""
    found: list[Tensor] = resolve(optimizer, "bf16_groups_flat" if kind == "bf16" else "bit16_groups_flat")
    return found


def optimizer_state(optimizer: Any, kind: Layout) -> Any:
    """Return the optimizer's state, by the tensor that it updates."""
    return (optimizer if kind == "whole" else resolve(optimizer, "optimizer")).state


def owned_part(optimizer: Any, parameter: nn.Parameter, kind: Layout, rank: int) -> FlatPart | None:
    """Return the range of a trained parameter that this process, rank `rank`, owns; None if it owns none of it."""
    flats = _master_tensors(optimizer, kind)
    if kind == "shards":
        group, offset, _ = resolve(optimizer, "grad_position")[resolve(optimizer, "get_param_id")(parameter)]
        share, size = local_shard(parameter)
        start = rank * share.numel()
        length = min(share.numel(), size - start)
        return FlatPart(flats[group], start, length, offset) if length > 0 else None
    mapping = resolve(parameter, "_hp_mapping")
    if mapping is None:  # no part of the parameter lies in this rank's partition
        return None
    source, target = resolve(mapping, "lp_fragment_address"), resolve(mapping, "hp_fragment_address")
    return FlatPart(flats[resolve(mapping, "param_group_index")], source.start, source.numel, target.start)


def local_shard(parameter: nn.Parameter) -> tuple[Tensor, int]:
    """Stage 3: return this rank's shard of the working weight (padded at the end), and the parameter's whole size."""
    return resolve(parameter, "ds_tensor"), resolve(parameter, "ds_numel")


def rebuild_working_weights(optimizer: Any, kind: Layout) -> None:
    """Rebuild the working weights on all ranks from changed master weights. Collective."""
    if kind in ("parts", "bf16"):
        resolve(optimizer, "update_lp_params")()
    elif kind == "shards":
        # Weights that are still gathered from the last pass would keep their old values.
        resolve(optimizer, "_partition_all_parameters")()
        for group in range(len(_master_tensors(optimizer, kind))):
            resolve(optimizer, "_reassign_or_swap_out_partitioned_parameters")(group)
        persistent = resolve(optimizer, "persistent_parameters")
        if persistent:
            resolve(persistent[0], "all_gather")(persistent)
