"""Every private or undocumented name of DeepSpeed that we use, and its purpose.

DeepSpeed may rename them in any release. Each access raises `LibraryChanged` then. Before a rank builds its engine, a
small one makes every access in a step, a save and a load (`rehearsal.py`). That the names still have their meaning is
measured there and counted (`overlap.py`). A method is replaced only through `replace_method`, which never adds a new
one.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from encoder_core.errors import library_changed

Layout = Literal["whole", "parts", "bf16", "shards"]
"""Layout of state. `whole`: stage 0. `parts`: stages 1 and 2. `bf16`: stage 1 in bf16. `shards`: stage 3."""

REDUCERS = ("reduce_ready_partitions_and_remove_grads", "independent_gradient_partition_epilogue")


class FlatPart(NamedTuple):
    """A part of a parameter in a flat tensor: `length` numbers, from number `start` of the parameter, at `offset` of
    `flat`.
    """

    flat: Tensor
    start: int
    length: int
    offset: int

    @property
    def stop(self) -> int:
        return self.start + self.length

    def view(self, flat: Tensor) -> Tensor:
        """Return these numbers of a tensor with the layout of `flat`."""
        return flat.detach().view(-1).narrow(0, self.offset, self.length)


def layout(stage: int, precision: str) -> Layout:
    if stage == 0:
        return "whole"
    if stage == 3:
        return "shards"
    return "bf16" if (stage, precision) == (1, "bf16") else "parts"


def resolve(owner: Any, name: str) -> Any:
    """Return the attribute `name`.

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
    """Prevent work at the start that training does not need. Call it directly after the import."""
    # On a CPU DeepSpeed would compile a shared-memory reduction at every first start, for inference only. Training
    # reduces through gloo, so it is declared absent, and no machine needs a compiler. On a GPU DeepSpeed does not have
    # the operator, and asking for the table of operators would try every one.
    if deepspeed.accelerator.get_accelerator().device_name() == "cpu":
        operators = resolve(deepspeed.ops, "__compatible_ops__")
        if "deepspeed_shm_comm" not in operators:
            raise library_changed("deepspeed", "ops.__compatible_ops__['deepspeed_shm_comm']")
        operators["deepspeed_shm_comm"] = False
    # DeepSpeed imports its Muon at construction, and torch compiles kernels that are never used: 1.4 s for each start.
    compiler = resolve(resolve(deepspeed, "runtime"), "compiler")
    plain = resolve(compiler, "dummy_decorator")
    replace_method(compiler, "compile", lambda: plain)


def reset_parameter_numbers(deepspeed: Any) -> None:
    """Reset what stage 3 counts over all engines of a process. Ranks compare the numbers of their parameters and
    modules, and a process that has had an engine before trains beside one that has not.
    """
    init = resolve(resolve(deepspeed, "zero"), "Init")
    for counter in ("param_id", "num_persisted_parameters", "num_persisted_elements"):
        resolve(init, counter)
        setattr(init, counter, 0)
    offload = resolve(resolve(deepspeed.runtime.zero, "parameter_offload"), "DeepSpeedZeRoOffload")
    # The number of modules is the default of an argument, a list that all calls share.
    match resolve(offload, "_register_deepspeed_module").__defaults__:
        case ([int()] as count,):
            count[0] = 0
        case _:
            raise library_changed("deepspeed", "the count of modules in _register_deepspeed_module")


def sum_gradients(optimizer: Any) -> None:
    """Make stage 3 sum gradients over ranks, in `reduce_dtype`; it offers the mean only.

    Scaling the loss by, say, 3 ranks instead would round every bf16 gradient differently than on one rank.
    """
    replace_method(optimizer, "_gradient_averaging_world_size", lambda params, world: 1)


def gradient_norm(optimizer: Any) -> float:
    """Return the gradient norm of the current step, before clipping."""
    return float(resolve(optimizer, "_global_grad_norm"))


def fp32_gradient_sums(optimizer: Any) -> list[tuple[Tensor, Sequence[nn.Parameter]]]:
    """Stage 1 in bf16: return the sums of gradients of each parameter group, and its parameters in order."""
    flats, groups = resolve(optimizer, "fp32_groups_gradients_flat"), resolve(optimizer, "bf16_groups")
    return list(zip(flats, groups, strict=True))


def flat_tensors(optimizer: Any, kind: Layout) -> list[tuple[Tensor, list[nn.Parameter]]]:
    """Return the flat tensors that the optimizer steps, each with the parameters that lie in it on any rank.

    The order is the same on all ranks.
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
    """Return the state of the tensors that the optimizer steps, by tensor."""
    return (optimizer if kind == "whole" else resolve(optimizer, "optimizer")).state


def owned_part(optimizer: Any, parameter: nn.Parameter, kind: Layout, rank: int) -> FlatPart | None:
    """Return the part of a trained parameter that this rank owns, or None."""
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
    """Stage 3: return this rank's share of the working weight (the last shares are padded) and the parameter's size."""
    return resolve(parameter, "ds_tensor"), resolve(parameter, "ds_numel")


def rebuild_working_weights(optimizer: Any, kind: Layout) -> None:
    """Rebuild the working copies on all ranks after master weights have changed."""
    if kind in ("parts", "bf16"):
        resolve(optimizer, "update_lp_params")()
    elif kind == "shards":
        # Weights that the last pass gathered for the next one would stay as they were.
        resolve(optimizer, "_partition_all_parameters")()
        for group in range(len(_master_tensors(optimizer, kind))):
            resolve(optimizer, "_reassign_or_swap_out_partitioned_parameters")(group)
        persistent = resolve(optimizer, "persistent_parameters")
        if persistent:
            resolve(persistent[0], "all_gather")(persistent)
