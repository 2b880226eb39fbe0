"""Addresses of the fused attention's kernels beyond what 32 bits hold: a row far behind the first token gives the bits
that it gives at the first token.

The tokens before it are holes of sparse files. An offset that wraps to 32 bits falls into them: it reads zeros there,
and what it writes is missing where the row is.
"""

from collections.abc import Callable
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from encoder_core.kernels import fused_attention as attention
from encoder_core.kernels.forward import forward_kernel
from encoder_core.kernels.tiling import Tiling, Tilings, make_tile
from tests.support.models.relative_attention import DROPOUT, Form, Problem, problem

HEADS, WIDTH, LENGTH, CUTS = 4, 2, 9, Tilings(*[Tiling(16, 4, 1)] * 3)
START = 2**32 // HEADS + 7  # a place of a query and head wraps to a small positive one, which is in the hole
FORMS = {
    "tables": Form(HEADS, WIDTH, table_a=True, table_b=True, table_c=True, dropout=DROPOUT, dtype=torch.float32),
    "queries": Form(
        HEADS,
        WIDTH,
        table_a=True,
        own_r=True,
        segments=True,
        order=True,
        few=True,
        carried=3,
        dropout=DROPOUT,
        dtype=torch.float32,
    ),
}
Move = Callable[[Tensor], Tensor]


@pytest.fixture
def far(tmp_path: Path) -> Move:
    """Puts a tensor behind START rows that take no room."""

    def move(near: Tensor) -> Tensor:
        file, shape = tmp_path / "tensor", (START + len(near), *near.shape[1:])
        moved = torch.from_file(str(file), shared=True, size=prod(shape), dtype=near.dtype).view(shape)
        file.unlink()
        moved[START:] = near
        return moved

    return move


@pytest.mark.long
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_row_behind_2_to_the_32_vectors_gives_the_same_bits(form: Form, far: Move) -> None:
    given = problem([LENGTH], form)
    near, away = outcome(given, lambda x: x), outcome(moved(given, far), far)
    assert near.keys() == away.keys()
    for name, tensor in near.items():
        assert tensor.any(), name
        assert torch.equal(away[name][-len(tensor) :], tensor), name


def moved(given: Problem, far: Move) -> Problem:
    """All that belongs to tokens stands START rows further on."""
    layout = given.layout
    names = ("segments_q", "segments_k", "ranks_q", "ranks_k", "draws")
    changed: dict[str, Any] = {name: far(x) for name in names if (x := getattr(layout, name)) is not None}
    if layout.slots is not None:
        changed["slots"] = far(torch.where(layout.slots < 0, layout.slots, layout.slots + START))
    inputs = {n: x if n.startswith("table") else far(x.detach()) for n, x in given.inputs.items()}
    return Problem(inputs, replace(layout, cu_seqlens=layout.cu_seqlens + START, **changed))


def outcome(given: Problem, place: Move) -> dict[str, Tensor]:
    """The context, log2 of its sums and all derivatives. `place` puts tensors of tokens where the problem's are.

    `fused_attention` itself would take memory for all tokens before, so its launches are called one by one.
    """
    inputs, layout = given.inputs, given.layout
    names = ("q", "k", "v", "r", "table_a", "table_b", "table_c", "segment_scores")
    tensors = [inputs[name].detach() if name in inputs else None for name in names]
    x = attention._kernel_inputs(tensors, layout)
    before = int(layout.cu_seqlens[0])
    queries, keys = len(inputs["q"]) - before, len(inputs["k"]) - before

    def zeros(count: int, *last: int) -> Tensor:
        return place(torch.zeros(count, HEADS, *last))

    context, log_sums, deltas = zeros(queries, WIDTH), zeros(queries), zeros(queries)
    forward_kernel[(1, HEADS)](x, context, log_sums, 1, make_tile(x, CUTS.forward.size))
    grad = place(torch.linspace(-1, 2, queries * HEADS * WIDTH).view(queries, HEADS, WIDTH))
    by: list[Tensor | None] = [zeros(queries, WIDTH), zeros(keys, WIDTH), zeros(keys, WIDTH)]
    by += [zeros(queries, WIDTH) if "r" in inputs else None, None, None, None]
    by += [zeros(queries, 2) if "segment_scores" in inputs else None]
    attention._run_query_kernel((x, grad, log_sums, deltas), context, by, layout, CUTS.queries)
    attention._run_key_kernel((x, grad, log_sums, deltas), by, layout, CUTS.keys)
    found = {name: tensor for name, tensor in zip(names, by, strict=True) if tensor is not None}
    return {"context": context, "log_sums": log_sums, **found}
