"""Every name of DeepSpeed's that is private or undocumented and that we use, and what it is used for.

DeepSpeed may rename them in any release. `ensure_names` looks for all that a stage uses when an engine is built, and
each access afterwards raises `LibraryChanged`, too. That the names still do what they did is measured (`rehearsal.py`)
and counted (`overlap.py`). A method is replaced through `replace_method` only, which never makes a new one.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from encoder_core.errors import library_changed

Layout = Literal["whole", "parts", "bf16", "shards"]
"""How state lies: at stage 0; at stages 1 and 2; at stage 1 in bf16; at stage 3."""

ENGINE = (
    "basic_optimizer",
    "optimizer",
    "global_rank",
    "world_size",
    "module",
    "buffered_allreduce_fallback",
)
ORDERED = ("reduce_ready_partitions_and_remove_grads", "independent_gradient_partition_epilogue")
OPTIMIZER: dict[Layout, tuple[str, ...]] = {
    "whole": (),
    "parts": (
        "optimizer",
        "single_partition_of_fp32_groups",
        "bit16_groups",
        "bit16_groups_flat",
        "update_lp_params",
        "_global_grad_norm",
        *ORDERED,
    ),
    "bf16": (
        "optimizer",
        "fp32_groups_flat_partition",
        "fp32_groups_gradients_flat",
        "bf16_groups",
        "bf16_groups_flat",
        "update_lp_params",
    ),
    "shards": (
        "optimizer",
        "fp32_partitioned_groups_flat",
        "fp16_groups",
        "grad_position",
        "get_param_id",
        "persistent_parameters",
        "_reassign_or_swap_out_partitioned_parameters",
        "_gradient_averaging_world_size",
        "_global_grad_norm",
        *ORDERED,
    ),
}
PARAMETER: dict[Layout, tuple[str, ...]] = {
    "whole": (),
    "parts": ("_hp_mapping",),
    "bf16": ("_hp_mapping",),
    "shards": ("ds_id", "ds_tensor", "ds_numel", "all_gather"),
}
MAPPING = ("param_group_index", "lp_fragment_address", "hp_fragment_address")


class Place(NamedTuple):
    """Where `length` numbers of a parameter, from `start`, lie: in `flat`, from `offset`."""

    flat: Tensor
    start: int
    length: int
    offset: int


def layout(stage: int, precision: str) -> Layout:
    if stage == 0:
        return "whole"
    if stage == 3:
        return "shards"
    return "bf16" if (stage, precision) == (1, "bf16") else "parts"


def name_of(owner: Any, name: str) -> Any:
    """The attribute `name`. Raises LibraryChanged: there is none."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise library_changed("deepspeed", f"{type(owner).__name__}.{name}") from error


def ensure_names(engine: Any, trained: Sequence[nn.Parameter], kind: Layout) -> None:
    """Raises LibraryChanged: something that our code uses with this layout has another name now."""
    for name in ENGINE:
        name_of(engine, name)
    for name in OPTIMIZER[kind]:
        name_of(engine.optimizer, name)
    for parameter in trained:
        for name in PARAMETER[kind]:
            name_of(parameter, name)
        mapping = getattr(parameter, "_hp_mapping", None) if kind in ("parts", "bf16") else None
        if mapping is not None:
            for name in MAPPING:
                name_of(mapping, name)


def replace_method(owner: Any, name: str, by: Callable[..., Any]) -> Callable[..., Any]:
    """`by` takes the place of the method; returns what was there."""
    before: Callable[..., Any] = name_of(owner, name)
    setattr(owner, name, by)
    return before


def without_needless_starts(deepspeed: Any) -> None:
    """Right after the import: nothing is compiled that training does not use."""
    # On a CPU DeepSpeed would compile a shared-memory reduction at every first start, for inference only. Training
    # reduces through gloo, so it is declared absent, and no machine needs a compiler. On a GPU DeepSpeed does not have
    # the operator, and asking for the table of operators would try every one.
    if deepspeed.accelerator.get_accelerator().device_name() == "cpu":
        operators = name_of(deepspeed.ops, "__compatible_ops__")
        if "deepspeed_shm_comm" not in operators:
            raise library_changed("deepspeed", "ops.__compatible_ops__['deepspeed_shm_comm']")
        operators["deepspeed_shm_comm"] = False
    # At construction it imports Muon, whose kernels it has torch compile, though nobody may use them: 1.4 s a start.
    compiler = name_of(name_of(deepspeed, "runtime"), "compiler")
    plain = name_of(compiler, "dummy_decorator")
    replace_method(compiler, "compile", lambda: plain)


def sum_gradients(optimizer: Any) -> None:
    """Stage 3 offers the mean over ranks only. This scales it back to the sum, in `reduce_dtype`; scaling the loss
    by, say, 3 ranks would round every bf16 gradient otherwise than on one rank."""
    replace_method(optimizer, "_gradient_averaging_world_size", lambda params, world: 1)


def gradient_norm(optimizer: Any) -> float:
    """Of the step that is under way, before clipping."""
    return float(name_of(optimizer, "_global_grad_norm"))


def fp32_sums(optimizer: Any) -> list[tuple[Tensor, Sequence[nn.Parameter]]]:
    """Stage 1 in bf16: the sums of gradients of each parameter group, and its parameters in order."""
    flats, groups = name_of(optimizer, "fp32_groups_gradients_flat"), name_of(optimizer, "bf16_groups")
    return list(zip(flats, groups, strict=True))


def flat_tensors(optimizer: Any, kind: Layout) -> list[tuple[Tensor, list[nn.Parameter]]]:
    """The flat tensors that the optimizer steps, and the parameters that lie in each on any rank. In the same order on
    all ranks."""
    groups = {"parts": "bit16_groups", "bf16": "bf16_groups", "shards": "fp16_groups"}[kind]
    return list(zip(_flats(optimizer, kind), name_of(optimizer, groups), strict=True))


def _flats(optimizer: Any, kind: Layout) -> list[Tensor]:
    names = {
        "parts": "single_partition_of_fp32_groups",
        "bf16": "fp32_groups_flat_partition",
        "shards": "fp32_partitioned_groups_flat",
    }
    found: list[Tensor] = name_of(optimizer, names[kind])
    return found


def working_flats(optimizer: Any, kind: Layout) -> list[Tensor]:
    """Stages 1 and 2: the memory that the working weights of each parameter group lie in."""
    found: list[Tensor] = name_of(optimizer, "bf16_groups_flat" if kind == "bf16" else "bit16_groups_flat")
    return found


def place_of(optimizer: Any, parameter: nn.Parameter, kind: Layout, rank: int) -> Place | None:
    """What this rank owns of a trained parameter; None if it owns nothing of it."""
    flats = _flats(optimizer, kind)
    if kind == "shards":
        group, offset, _ = name_of(optimizer, "grad_position")[name_of(optimizer, "get_param_id")(parameter)]
        share, size = shard_of(parameter)
        start = rank * share.numel()
        length = min(share.numel(), size - start)
        return Place(flats[group], start, length, offset) if length > 0 else None
    mapping = name_of(parameter, "_hp_mapping")
    if mapping is None:  # no part of it lies in this rank's partition
        return None
    source, target = name_of(mapping, "lp_fragment_address"), name_of(mapping, "hp_fragment_address")
    return Place(flats[name_of(mapping, "param_group_index")], source.start, source.numel, target.start)


def shard_of(parameter: nn.Parameter) -> tuple[Tensor, int]:
    """Stage 3: this rank's share of the working weight, the last ones padded, and the parameter's size."""
    return name_of(parameter, "ds_tensor"), name_of(parameter, "ds_numel")


def publish(optimizer: Any, kind: Layout) -> None:
    """After master weights changed: rebuild the working copies that all ranks compute with."""
    if kind in ("parts", "bf16"):
        name_of(optimizer, "update_lp_params")()
    elif kind == "shards":
        for group in range(len(_flats(optimizer, kind))):
            name_of(optimizer, "_reassign_or_swap_out_partitioned_parameters")(group)
        persistent = name_of(optimizer, "persistent_parameters")
        if persistent:
            name_of(persistent[0], "all_gather")(persistent)
