"""The fused attention's formula written out, one row after the other, and random problems for it.

Needs Triton: a test skips before it imports this where there is none. The kernels are interpreted on a CPU, or compiled
for a GPU (`tests/support/checks/gpu.py`), and tensors are where they run.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from encoder_core.kernels.fused_attention import Layout, Terms, fused_attention
from encoder_core.kernels.tiling import Tilings
from encoder_core.random_draws import head_keys, numbers16

RATE_DROPPED = 20_000  # of 65,536
DEVICE = torch.device("cpu" if os.environ.get("TRITON_INTERPRET", "1") == "1" else "cuda")


@dataclass(frozen=True)
class Problem:
    """What `fused_attention` is given."""

    q: Tensor
    k: Tensor
    v: Tensor
    terms: Terms
    layout: Layout

    @property
    def inputs(self) -> dict[str, Tensor]:
        """All that has a gradient."""
        found = {"q": self.q, "k": self.k, "v": self.v, **vars(self.terms)}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


@dataclass(frozen=True)
class Form:
    """Which terms a problem has, and what its queries see."""

    heads: int = 2
    width: int = 8
    table_a: bool = False
    table_b: bool = False
    table_c: bool = False
    own_r: bool = False
    segments: bool = False
    order: bool = False
    signs: bool = False
    few: bool = False
    dropout: bool = False
    carried: int = 0
    window: int | None = None
    causal: bool = False
    across: bool = False
    dtype: torch.dtype = field(default=torch.float64)


def problem(lengths: list[int], form: Form, seed: int = 0) -> Problem:
    """Random tensors for rows of these lengths."""
    draws = np.random.default_rng(seed)
    tokens, longest = sum(lengths), max(lengths, default=0)
    others = draws.integers(0, 2 * longest + 1, size=len(lengths)).tolist() if form.across else []
    keys = sum(others) if form.across else tokens + len(lengths) * form.carried
    at = _queries(draws, tokens, form)
    distances = max(1, 2 * (longest + form.carried) - 1)

    def normal(*shape: int) -> Tensor:
        return torch.from_numpy(draws.standard_normal(shape)).to(DEVICE, form.dtype).requires_grad_()

    def vectors(wanted: bool, count: int, *last: int) -> Tensor | None:
        return normal(count, form.heads, *last) if wanted else None

    def whole(wanted: bool, count: int, below: int) -> Tensor | None:
        return torch.from_numpy(draws.integers(below, size=count)).to(DEVICE) if wanted else None

    terms = Terms(
        r=vectors(form.own_r, len(at), form.width),
        table_a=vectors(form.table_a, distances, form.width),
        table_b=vectors(form.table_b, distances, form.width),
        table_c=vectors(form.table_c, distances),
        segment_scores=vectors(form.segments, len(at), 2),
    )
    layout = Layout(
        cu_seqlens=torch.tensor([0, *lengths], device=DEVICE).cumsum(0).int(),
        longest=longest,
        scale=0.4,
        segments_q=whole(form.segments, len(at), 2),
        segments_k=whole(form.segments, keys, 2),
        ranks_q=whole(form.order, len(at), 9),
        ranks_k=whole(form.order, keys, 9),
        slots=_slots(at, tokens) if form.few else None,
        signs=_signs(draws, lengths) if form.signs else None,
        carried=form.carried,
        center=longest + form.carried - 1,
        window=form.window,
        causal=form.causal,
        cu_seqlens_k=torch.tensor([0, *others], device=DEVICE).cumsum(0).int() if form.across else None,
        longest_k=max(others, default=0) if form.across else None,
    )
    if form.dropout:
        layout = replace(
            layout,
            draws=torch.from_numpy(draws.integers(-(2**63), 2**63 - 1, size=len(at))).to(DEVICE),
            threshold=RATE_DROPPED,
            inverse=2**16 / (2**16 - RATE_DROPPED),
        )
    q, k, v = (normal(count, form.heads, form.width) for count in (len(at), keys, keys))
    return Problem(q, k, v, terms, layout)


def _queries(draws: np.random.Generator, tokens: int, form: Form) -> np.ndarray:
    """Which tokens are queries."""
    every = np.arange(tokens)
    return every[draws.random(tokens) < 0.2] if form.few else every


def _slots(at: np.ndarray, tokens: int) -> Tensor:
    slots = torch.full((tokens,), -1, dtype=torch.int32)
    slots[torch.from_numpy(at)] = torch.arange(len(at), dtype=torch.int32)
    return slots.to(DEVICE)


def _signs(draws: np.random.Generator, lengths: list[int]) -> Tensor:
    return torch.from_numpy(1 - 2 * draws.integers(2, size=len(lengths))).int().to(DEVICE)


def formula(given: Problem, *, rounded: bool = False, cancels: bool = True) -> Tensor:
    """The context [M, N, D], from every score. `rounded`: to bf16 where flash attention rounds. Without `cancels` the
    gradients lack the part of a softmax's that cancels the other where one probability is nearly 1.
    """
    context = 0.0 * given.q
    for row, (start, stop) in enumerate(pairwise(given.layout.cu_seqlens.tolist())):
        positions = torch.arange(stop - start)
        queries = torch.arange(start, stop)
        if given.layout.slots is not None:
            queries = given.layout.slots[start:stop].long()
            positions, queries = positions[queries >= 0], queries[queries >= 0]
        if len(queries):
            scores, keys = _scores(given, row, queries, positions)
            kept = _kept(given, queries, keys)
            if rounded:
                mixed = _Flash.apply(scores, given.v[keys], kept)
            else:
                mixed = torch.einsum("nqk,knd->qnd", _softmax(scores, cancels) * kept, given.v[keys])
            context = context.index_copy(0, queries, mixed)
    return context


class _Flash(torch.autograd.Function):
    """Context of scores [N, Q, K] and values [K, N, D] (Dao et al., 2022, appendix B.4): probabilities and their
    derivatives meet other tensors in bf16, and a query's delta is taken from the context in bf16."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, v: Tensor, kept: Tensor) -> Tensor:
        weights = _softmax(scores)
        context = _bf16(torch.einsum("nqk,knd->qnd", _bf16(weights * kept), v))
        ctx.save_for_backward(weights, v, kept, context)
        return context

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        weights, v, kept, context = ctx.saved_tensors
        delta = (grad * context).sum(-1).t()[..., None]
        by_weights = torch.einsum("qnd,knd->nqk", grad, v) * kept
        by_v = torch.einsum("nqk,qnd->knd", _bf16(weights * kept), grad)
        return _bf16(weights * (by_weights - delta)), by_v, None


def _bf16(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


def _softmax(scores: Tensor, cancels: bool = True) -> Tensor:
    """A query that sees nothing has no weights."""
    if not cancels:
        whole = scores.logsumexp(-1, keepdim=True).detach()
        return (scores - whole.nan_to_num(neginf=0.0)).exp()
    return scores.softmax(-1).masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0)


def _kept(given: Problem, queries: Tensor, keys: Tensor) -> Tensor:
    """What dropout multiplies the weights by, [N, Q, K] or 1."""
    layout = given.layout
    if layout.draws is None:
        return torch.ones((), dtype=given.q.dtype)
    places = head_keys(layout.draws[queries], range(given.q.shape[1])).t()
    numbers = numbers16(places, torch.zeros((), dtype=torch.int64), range(len(keys)))
    return (numbers >= layout.threshold - 2**15).to(given.q.dtype) * layout.inverse


def _scores(given: Problem, row: int, queries: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """[N, Q, K], -inf out of sight, and which keys are meant."""
    layout = given.layout
    start, stop = (int(edge) for edge in layout.cu_seqlens[row : row + 2])
    keys = torch.arange(start + row * layout.carried, stop + (row + 1) * layout.carried)
    if layout.cu_seqlens_k is not None:
        keys = torch.arange(*layout.cu_seqlens_k[row : row + 2].tolist())
    apart = positions[:, None] - (torch.arange(len(keys)) - layout.carried)
    scores = torch.stack(list(_terms(given, row, queries, keys, apart))).sum(0) * layout.scale
    seen = torch.ones_like(apart, dtype=torch.bool)
    if layout.window is not None:
        seen &= apart.abs() <= layout.window
    if layout.causal:
        seen &= apart >= 0
    if layout.ranks_q is not None and layout.ranks_k is not None:
        seen &= layout.ranks_k[keys] < layout.ranks_q[queries][:, None]
    return scores.masked_fill(~seen, float("-inf")), keys


def _terms(given: Problem, row: int, queries: Tensor, keys: Tensor, apart: Tensor) -> Iterator[Tensor]:
    """The score's, [N, Q, K] each."""
    terms, layout = given.terms, given.layout
    sign = 1 if layout.signs is None else layout.signs[row]
    place = sign * apart + layout.center
    q, k = given.q[queries], given.k[keys]
    yield torch.einsum("qnd,knd->nqk", q, k)
    if terms.table_a is not None:
        r = q if terms.r is None else terms.r[queries]
        yield torch.einsum("qnd,qknd->nqk", r, terms.table_a[place])
    if terms.table_b is not None:
        yield torch.einsum("knd,qknd->nqk", k, terms.table_b[place])
    if terms.table_c is not None:
        yield terms.table_c[place].movedim(-1, 0)
    if terms.segment_scores is not None and layout.segments_q is not None and layout.segments_k is not None:
        apart = layout.segments_q[queries][:, None] != layout.segments_k[keys]
        same, other = terms.segment_scores[queries].movedim(0, -1).unbind(1)
        yield torch.where(apart, other[..., None], same[..., None])


def outcome(context: Tensor, given: Problem) -> dict[str, Tensor]:
    """The context, and the gradients of a weighted sum of it."""
    weights = torch.linspace(-1, 2, max(1, context.numel()), dtype=context.dtype, device=context.device)[
        : context.numel()
    ]
    inputs = given.inputs
    sums = (context * weights.view_as(context)).sum()
    gradients = torch.autograd.grad(sums, list(inputs.values()), allow_unused=True, materialize_grads=True)
    return {"context": context, **dict(zip(inputs, gradients, strict=True))}


def fused(given: Problem, cuts: Tilings | None = None) -> dict[str, Tensor]:
    """What the kernels make of it."""
    return outcome(fused_attention(given.q, given.k, given.v, given.terms, given.layout, cuts), given)


def expected(given: Problem, *, cancels: bool = True) -> dict[str, Tensor]:
    """What the formula makes of it, in fp64 on the CPU."""
    wide = converted(given, torch.float64)
    return outcome(formula(wide, cancels=cancels), wide)


def converted(given: Problem, dtype: torch.dtype) -> Problem:
    """The same numbers, on the CPU."""

    def moved(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.detach().cpu().to(dtype).requires_grad_()

    q, k, v = (moved(x) for x in (given.q, given.k, given.v))
    assert q is not None
    assert k is not None
    assert v is not None
    layout: dict[str, Any] = {
        n: x.cpu() if isinstance(x, Tensor) else x for n, x in vars(given.layout).items()
    }
    return Problem(q, k, v, Terms(**{n: moved(x) for n, x in vars(given.terms).items()}), Layout(**layout))


def assert_same(
    found: dict[str, Tensor],
    wanted: dict[str, Tensor],
    tolerance: float,
    scale: dict[str, Tensor] | None = None,
) -> None:
    """Each within `tolerance` of the largest number of its kind, in `wanted` or in `scale`.

    `scale`: gradients before they cancel. A kernel rounds the context before it takes the part that cancels from it, so
    what is left of a gradient that is nearly 0 has the error of what was there before.
    """
    assert found.keys() == wanted.keys()
    for name, tensor in {name: tensor.cpu() for name, tensor in wanted.items()}.items():
        if tensor.numel():
            most = max(float(each[name].detach().abs().max()) for each in (wanted, scale or wanted))
            error = float((found[name].detach().double().cpu() - tensor.detach().double()).abs().max()) / max(
                most, 1e-9
            )
            assert error <= tolerance, f"{name}: {error:.1e}"
