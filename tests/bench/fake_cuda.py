"""The forward pass of every family on a GPU that is not there: python tests/bench/fake_cuda.py.

Tensors are torch's fake ones, of device "cuda": they have shapes and dtypes and no numbers, so an operation whose
outcome depends on numbers raises. The base recipes run at their own size, in bf16, with dropout and without. Our fused
attention does everything but launch its kernels. Backward passes need a device; `operations.py` counts those on a CPU.

This needs torch's CUDA build, which README's installation takes where no other is configured: 3 GB to download, in an
environment ENV of its own.

    PYTHONPATH=. ENV/bin/python tests/bench/fake_cuda.py
"""

import json
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from dispatched import Dispatched
from gpu_path import launched
from operations import RECIPES, add_teachers, batch_of
from program import BenchError, note, run
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from encoder_core.batch import Batch
from encoder_core.objectives.modules.losses import ObjectiveModule
from launcher.runtime.recipe.load import load
from launcher.runtime.recipe.network import objective_module
from launcher.runtime.recipe.schema import Recipe

LENGTHS = (512, 37, 300, 128)
VOCABULARY = 30_522  # of recipes that take their tokenizer's
_CUDA = torch.device("cuda", 0)
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm", "addmm_", "convolution"}


@dataclass(frozen=True)
class Passed:
    """One forward pass.

    Attributes:
        attention: kernels of attention and how often each is launched.
        products: dtypes of matrix products. losses: of the terms' sums.
        kernels: all operations that are kernels. waits: those that a GPU would be waited for.
    """

    family: str
    dropout: bool
    attention: dict[str, int]
    products: list[str]
    losses: list[str]
    kernels: int
    waits: list[str]


class HostStaysReal(TorchDispatchMode):
    """Inside a `FakeTensorMode`: what is on the host is computed; what a device has, or shall have, is fake."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        if func is torch.ops.aten._pin_memory.default:
            return args[0]
        if any(_is_of_device(x) for x in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        with unset_fake_temporarily():
            return func(*args, **kwargs)


def _is_of_device(x: object) -> bool:
    return isinstance(x, FakeTensor) or (isinstance(x, torch.device) and x.type == "cuda")


class Products(TorchDispatchMode):
    """In which dtypes matrices are multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in _PRODUCTS:
            self.dtypes.add(_name(out.dtype))
        return out


def main(
    families: Annotated[list[str] | None, typer.Argument(help="All, if none is named.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    if torch.version.cuda is None:
        raise BenchError(
            "this torch was built without CUDA, whose fake tensors need it",
            remedy="take an environment of README's installation",
        )
    found = []
    for family in families or RECIPES:
        note(family)
        found += [passed(family, dropout=dropout) for dropout in (True, False)]
    print(json.dumps([asdict(one) for one in found], indent=2) if as_json else render(found))


def render(found: list[Passed]) -> str:
    """A table."""
    lines = [
        "| family | dropout | attention: launches | products | losses | kernels | waits |",
        "|---|---|---|---|---|--:|--:|",
    ]
    for one in found:
        attention = ", ".join(f"{name}: {count}" for name, count in sorted(one.attention.items()))
        lines.append(
            f"| {one.family} | {'on' if one.dropout else 'off'} | {attention} | {', '.join(one.products)} "
            f"| {', '.join(one.losses)} | {one.kernels:,} | {len(one.waits)} |"
        )
    return "\n".join(lines)


def passed(family: str, *, dropout: bool) -> Passed:
    """Raises torch's errors where an operation depends on data."""
    recipe = _recipe(RECIPES[family], 0.1 if dropout else 0.0)
    batch = batch_of(recipe, LENGTHS, VOCABULARY)
    counts, products = Dispatched(), Products()
    with ExitStack() as stack:
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(HostStaysReal())
        stack.enter_context(launched(lambda name: counts.kernels.update([name])))
        module = _built(recipe)
        for mode in (counts, products):
            stack.enter_context(mode)
        losses = _turns(module, batch.to(_CUDA))
    attention = {name: count for name, count in counts.kernels.items() if _is_attention(name)}
    sums = {_name(term.loss_sum.dtype) for loss in losses for term in loss.terms}
    assert all(term.loss_sum.device == _CUDA for loss in losses for term in loss.terms)
    return Passed(family, dropout, attention, sorted(products.dtypes), sorted(sums), counts.count, counts.waits)


def _recipe(name: str, rate: float) -> Recipe:
    recipe = load(name)
    rates = ("dropout", "attention_dropout", "attention_output_dropout")
    changes: dict[str, Any] = {name: rate for name in rates if hasattr(recipe.model, name)}
    model = recipe.model.model_copy(update=changes | {"vocab": recipe.model.vocab or VOCABULARY})
    return recipe.model_copy(update={"model": model})


def _built(recipe: Recipe) -> ObjectiveModule:
    """Unset weights, in bf16."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with _CUDA:
            module = objective_module(recipe.model, recipe.objective)
            add_teachers(module, recipe)
    finally:
        torch.set_default_dtype(default)
    return module.train()


def _turns(module: ObjectiveModule, batch: Batch) -> list[Any]:
    """The forward passes of one microbatch: one for each update group. XLNet's second has memory."""
    losses: list[Any] = []
    memory: tuple[Tensor, ...] = ()
    for _ in module.update_groups():
        losses.append(module(batch, memory) if memory else module(batch))
        memory = losses[-1].memory
    return losses


def _is_attention(name: str) -> bool:
    return name.startswith(("fused ", "_flash_attention", "_scaled_dot_product", "_efficient_attention"))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    run(main)
