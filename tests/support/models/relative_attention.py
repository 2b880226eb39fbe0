"""The fused attention's formula written out, one row after the other, and random problems for it.

Needs Triton: a test skips before it imports this where there is none. The kernels are interpreted on a CPU, or compiled
for a GPU (`tests/support/checks/gpu.py`), and tensors are where they run. `tests/gpu` has the same problems, in full
size. Shapes: as in `encoder_core/kernels/operands.py`.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from encoder_core.kernels.fused_attention import AttentionLayout, ScoreTerms, fused_attention
from encoder_core.kernels.tiling import Tilings
from encoder_core.layers.dropout import drop_threshold, kept_scale
from encoder_core.random_draws import head_keys, uniform_int16

DROPOUT = 20_000 / 65_536
CPU = torch.device("cpu")
DEVICE = CPU if os.environ.get("TRITON_INTERPRET", "1") == "1" else torch.device("cuda")
_FEW = 0.2  # share of the tokens that are queries, where not all are


@dataclass(frozen=True)
class Problem:
    """What `fused_attention` is given. `inputs`: every tensor that has a gradient, by name; `layout`: the rest."""

    inputs: dict[str, Tensor]
    layout: AttentionLayout

    @property
    def terms(self) -> ScoreTerms:
        return ScoreTerms(**{name: x for name, x in self.inputs.items() if name not in ("q", "k", "v")})


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
    dropout: float = 0.0
    carried: int = 0
    window: int | None = None
    causal: bool = False
    across: bool = False
    dtype: torch.dtype = field(default=torch.float64)


def problem(
    lengths: Sequence[int], form: Form, seed: int = 0, *, scale: float = 0.4, device: torch.device = DEVICE
) -> Problem:
    """Random tensors for rows of these lengths; the same numbers on any device. `scale` multiplies scores."""
    draws = np.random.default_rng(seed)
    tokens, longest = sum(lengths), max(lengths, default=0)
    others = draws.integers(0, 2 * longest + 1, size=len(lengths)).tolist() if form.across else []
    keys = sum(others) if form.across else tokens + len(lengths) * form.carried
    at = np.flatnonzero(draws.random(tokens) < _FEW) if form.few else np.arange(tokens)
    distances = max(1, 2 * (longest + form.carried) - 1)

    def vectors(count: int, *last: int) -> Tensor:
        drawn = torch.from_numpy(draws.standard_normal((count, form.heads, *last)))
        return drawn.to(device, form.dtype).requires_grad_()

    def whole(count: int, below: int) -> Tensor:
        return torch.from_numpy(draws.integers(below, size=count)).to(device)

    shapes = {
        "r": (len(at), form.width) if form.own_r else None,
        "table_a": (distances, form.width) if form.table_a else None,
        "table_b": (distances, form.width) if form.table_b else None,
        "table_c": (distances,) if form.table_c else None,
        "segment_scores": (len(at), 2) if form.segments else None,
    }
    terms = {name: vectors(*shape) for name, shape in shapes.items() if shape is not None}
    layout = AttentionLayout(
        cu_seqlens=torch.tensor([0, *lengths], device=device).cumsum(0).int(),
        longest=longest,
        scale=scale,
        segments_q=whole(len(at), 2) if form.segments else None,
        segments_k=whole(keys, 2) if form.segments else None,
        ranks_q=whole(len(at), 9) if form.order else None,
        ranks_k=whole(keys, 9) if form.order else None,
        slots=_slots(at, tokens).to(device) if form.few else None,
        signs=(1 - 2 * whole(len(lengths), 2)).int() if form.signs else None,
        carried=form.carried,
        center=longest + form.carried - 1,
        window=form.window,
        causal=form.causal,
        cu_seqlens_k=torch.tensor([0, *others], device=device).cumsum(0).int() if form.across else None,
        longest_k=max(others, default=0) if form.across else None,
    )
    if threshold := drop_threshold(form.dropout):
        drawn = torch.from_numpy(draws.integers(-(2**63), 2**63 - 1, size=len(at))).to(device)
        layout = replace(layout, draws=drawn, threshold=threshold, inverse=kept_scale(threshold))
    own = {name: vectors(count, form.width) for name, count in (("q", len(at)), ("k", keys), ("v", keys))}
    return Problem(own | terms, layout)


def _slots(at: np.ndarray, tokens: int) -> Tensor:
    slots = torch.full((tokens,), -1, dtype=torch.int32)
    slots[torch.from_numpy(at)] = torch.arange(len(at), dtype=torch.int32)
    return slots


def formula(given: Problem, *, rounded: bool = False, cancels: bool = True) -> Tensor:
    """The context [M, N, D], from every score. `rounded`: to bf16 where flash attention rounds. Without `cancels` the
    gradients lack the part of a softmax's that cancels the other where one probability is nearly 1.
    """
    context, v = 0.0 * given.inputs["q"], given.inputs["v"]
    for row, (start, stop) in enumerate(pairwise(given.layout.cu_seqlens.tolist())):
        positions = torch.arange(stop - start, device=v.device)
        queries = positions + start
        if given.layout.slots is not None:
            queries = given.layout.slots[start:stop].long()
            positions, queries = positions[queries >= 0], queries[queries >= 0]
        if len(queries):
            scores, keys = _scores(given, row, queries, positions)
            kept = _kept(given, queries, keys)
            if rounded:
                mixed = _Flash.apply(scores, v[keys], kept)
            else:
                mixed = torch.einsum("nqk,knd->qnd", _softmax(scores, cancels) * kept, v[keys])
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
    q, layout = given.inputs["q"], given.layout
    if layout.draws is None:
        return torch.ones((), dtype=q.dtype, device=q.device)
    return keep_mask(layout, queries, len(keys), q.shape[1]).to(q.dtype) * layout.inverse


def keep_mask(layout: AttentionLayout, queries: Tensor, keys: int, heads: int) -> Tensor:
    """Return [N, Q, K] bool, true where dropout keeps the probability, by plain operations."""
    assert layout.draws is not None
    places = head_keys(layout.draws[queries], range(heads)).t()
    numbers = uniform_int16(places, torch.zeros((), dtype=torch.int64), range(keys))
    return numbers >= layout.threshold - 2**15


def _scores(given: Problem, row: int, queries: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """[N, Q, K], -inf out of sight, and which keys are meant."""
    layout = given.layout
    start, stop = (int(edge) for edge in layout.cu_seqlens[row : row + 2])
    keys = torch.arange(start + row * layout.carried, stop + (row + 1) * layout.carried)
    if layout.cu_seqlens_k is not None:
        keys = torch.arange(*layout.cu_seqlens_k[row : row + 2].tolist())
    keys = keys.to(queries.device)
    apart = positions[:, None] - (torch.arange(len(keys), device=keys.device) - layout.carried)
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
    """The score's, [N, Q, K] each.

    Products with tables are computed for all distances and then looked up, because a table's rows for each pair of
    tokens of a long row would not fit into memory.
    """
    terms, layout = given.terms, given.layout
    sign = 1 if layout.signs is None else layout.signs[row]
    q, k = given.inputs["q"][queries], given.inputs["k"][keys]
    place = (sign * apart + layout.center)[None].expand(q.shape[1], -1, -1)
    yield torch.einsum("qnd,knd->nqk", q, k)
    if terms.table_a is not None:
        r = q if terms.r is None else terms.r[queries]
        yield torch.einsum("qnd,end->nqe", r, terms.table_a).gather(2, place)
    if terms.table_b is not None:
        yield torch.einsum("knd,end->nek", k, terms.table_b).gather(1, place)
    if terms.table_c is not None:
        yield terms.table_c.t()[:, None].expand(-1, len(queries), -1).gather(2, place)
    if terms.segment_scores is not None and layout.segments_q is not None and layout.segments_k is not None:
        apart = layout.segments_q[queries][:, None] != layout.segments_k[keys]
        same, other = terms.segment_scores[queries].movedim(0, -1).unbind(1)
        yield torch.where(apart, other[..., None], same[..., None])


def outcome(context: Tensor, given: Problem) -> dict[str, Tensor]:
    """The context, and the gradients of a weighted sum of it."""
    weights = torch.linspace(-1, 2, max(1, context.numel()), device=context.device, dtype=torch.float64)
    sums = (context * weights[: context.numel()].view_as(context).to(context.dtype)).sum()
    gradients = torch.autograd.grad(sums, list(given.inputs.values()), allow_unused=True, materialize_grads=True)
    return {"context": context.detach(), **dict(zip(given.inputs, gradients, strict=True))}


def kernels(given: Problem, cuts: Tilings | None = None) -> Tensor:
    """The context as the fused kernels compute it."""
    inputs = given.inputs
    return fused_attention(inputs["q"], inputs["k"], inputs["v"], given.terms, given.layout, cuts)


def fused(given: Problem, cuts: Tilings | None = None) -> dict[str, Tensor]:
    """What the kernels make of it."""
    return outcome(kernels(given, cuts), given)


def expected(given: Problem, *, cancels: bool = True) -> dict[str, Tensor]:
    """What the formula makes of it, in fp64 on the CPU."""
    wide = converted(given, torch.float64)
    return outcome(formula(wide, cancels=cancels), wide)


def converted(given: Problem, dtype: torch.dtype, device: torch.device = CPU) -> Problem:
    """The same numbers, as leaves of a graph of their own."""
    inputs = {name: x.detach().to(device, dtype).requires_grad_() for name, x in given.inputs.items()}
    layout: dict[str, Any] = {
        name: x.to(device) if isinstance(x, Tensor) else x for name, x in vars(given.layout).items()
    }
    return Problem(inputs, AttentionLayout(**layout))


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
