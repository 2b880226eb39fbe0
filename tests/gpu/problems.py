"""Random inputs for the fused attention, in every form that a model family needs, and the formula in fp64.

Shapes: as in `encoder_core/kernels/operands.py`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from encoder_core.kernels.fused_attention import Layout, Terms, fused_attention
from encoder_core.layers.dropout import drop_threshold, inverse_rate
from encoder_core.random_draws import head_keys, numbers16

_FEW = 0.2  # of the tokens that are queries, where not all are


@dataclass(frozen=True)
class Form:
    """The form of an attention problem: the terms of its scores, and the keys that queries see."""

    table_a: bool = False
    table_b: bool = False
    table_c: bool = False
    own_r: bool = False
    segments: bool = False
    order: bool = False
    signs: bool = False
    few: bool = False
    carried: bool = False
    window: int | None = None
    causal: bool = False


_XLNET = Form(table_a=True, own_r=True, segments=True, order=True, carried=True)
FORMS = {
    "plain": Form(),
    "window": Form(window=64),
    "causal": Form(causal=True),
    "causal-deberta": Form(table_a=True, table_b=True, causal=True),
    "relative-keys": Form(table_a=True),
    "deberta": Form(table_a=True, table_b=True),
    "deberta-positions": Form(table_a=True, table_b=True, table_c=True),
    "deberta-few-queries": Form(table_a=True, table_b=True, few=True),
    "xlnet-content": replace(_XLNET, signs=True),
    "xlnet-queries": replace(_XLNET, signs=True, few=True),
}


@dataclass(frozen=True)
class Size:
    """The size of a problem: lengths of its rows, number and width of its heads; `scores` multiplies the queries."""

    lengths: tuple[int, ...]
    heads: int
    width: int
    dtype: torch.dtype
    dropout: float = 0.0
    scores: float = 1.0


@dataclass(frozen=True)
class Problem:
    """The inputs of `fused_attention`. `inputs`: every tensor that has a gradient, by name; `layout`: the rest."""

    inputs: dict[str, Tensor]
    layout: Layout

    @property
    def terms(self) -> Terms:
        return Terms(**{name: x for name, x in self.inputs.items() if name not in ("q", "k", "v")})

    def to(self, dtype: torch.dtype) -> "Problem":
        """Return the same numbers in `dtype`, as leaves of a graph of their own."""
        return Problem(
            {n: x.detach().to(dtype).requires_grad_() for n, x in self.inputs.items()}, self.layout
        )


def problem(form: Form, size: Size, device: torch.device, seed: int = 0) -> Problem:
    """Return a random problem. It has the same numbers on any device, because they are drawn on the CPU."""
    draws = torch.Generator().manual_seed(seed)
    tokens, longest, rows = sum(size.lengths), max(size.lengths, default=0), len(size.lengths)
    carried = (longest // 4 // 4 * 4 if longest >= 16 else 3) if form.carried else 0
    queries = torch.arange(tokens)
    if form.few:
        queries = queries[torch.rand(tokens, generator=draws) < _FEW]
    keys, distances = tokens + rows * carried, max(1, 2 * (longest + carried) - 1)

    def normal(count: int, *last: int, by: float = 1.0) -> Tensor:
        numbers = by * torch.randn(count, size.heads, *last, generator=draws)
        return numbers.to(size.dtype).to(device).requires_grad_()

    def whole(count: int, below: int) -> Tensor:
        return torch.randint(below, (count,), generator=draws).to(device)

    inputs = {"q": normal(len(queries), size.width, by=size.scores)}
    inputs |= {"k": normal(keys, size.width), "v": normal(keys, size.width)}
    if form.own_r:
        inputs["r"] = normal(len(queries), size.width, by=size.scores)
    for name in ("table_a", "table_b"):
        if getattr(form, name):
            inputs[name] = normal(distances, size.width)
    if form.table_c:
        inputs["table_c"] = normal(distances)
    if form.segments:
        inputs["segment_scores"] = normal(len(queries), 2)
    layout = Layout(
        cu_seqlens=torch.tensor([0, *size.lengths]).cumsum(0).int().to(device),
        longest=longest,
        scale=size.width**-0.5,
        segments_q=whole(len(queries), 2) if form.segments else None,
        segments_k=whole(keys, 2) if form.segments else None,
        ranks_q=whole(len(queries), 9) if form.order else None,
        ranks_k=whole(keys, 9) if form.order else None,
        slots=_slots(queries, tokens, device) if form.few else None,
        signs=(1 - 2 * whole(rows, 2)).int() if form.signs else None,
        carried=carried,
        center=longest + carried - 1,
        window=form.window,
        causal=form.causal,
    )
    return Problem(inputs, _dropped(layout, size.dropout, len(queries), draws, device))


def _dropped(
    layout: Layout, rate: float, queries: int, draws: torch.Generator, device: torch.device
) -> Layout:
    threshold = drop_threshold(rate)
    if not threshold:
        return layout
    drawn = torch.randint(-(2**62), 2**62, (queries,), generator=draws).to(device)
    return replace(layout, draws=drawn, threshold=threshold, inverse=inverse_rate(threshold))


def _slots(queries: Tensor, tokens: int, device: torch.device) -> Tensor:
    slots = torch.full((tokens,), -1, dtype=torch.int32)
    slots[queries] = torch.arange(len(queries), dtype=torch.int32)
    return slots.to(device)


def kernels(given: Problem) -> Tensor:
    """Return the context as the fused kernels compute it."""
    inputs = given.inputs
    return fused_attention(inputs["q"], inputs["k"], inputs["v"], given.terms, given.layout)


def formula(given: Problem, *, cancels: bool = True) -> Tensor:
    """Return the context [M, N, D] from every score, row after row, in the precision of the inputs.

    With `cancels` false, the derivative of a score is its probability times the derivative by that probability: the
    mean that a softmax subtracts is left in. This shows how large derivatives are before they cancel, and so what
    error rounding may leave.
    """
    context, layout = 0.0 * given.inputs["q"], given.layout
    for row, (start, stop) in enumerate(pairwise(layout.cu_seqlens.tolist())):
        positions = torch.arange(stop - start, device=context.device)
        queries = positions + start
        if layout.slots is not None:
            queries = layout.slots[start:stop].long()
            positions, queries = positions[queries >= 0], queries[queries >= 0]
        if len(queries):
            weights, keys = _weights(given, row, queries, positions, (start, stop), cancels)
            found = torch.einsum("nqk,knd->qnd", weights, given.inputs["v"][keys])
            context = context.index_copy(0, queries, found)
    return context


def _weights(
    given: Problem, row: int, queries: Tensor, positions: Tensor, bounds: tuple[int, int], cancels: bool
) -> tuple[Tensor, Tensor]:
    """Return the probabilities [N, Q, K] after dropout, and the keys [K] that they are of."""
    layout, carried = given.layout, given.layout.carried
    first = bounds[0] + row * carried
    keys = torch.arange(first, bounds[1] + (row + 1) * carried, device=queries.device)
    apart = positions[:, None] - (keys - first - carried)
    seen = torch.ones_like(apart, dtype=torch.bool)
    if layout.window is not None:
        seen &= apart.abs() <= layout.window
    if layout.causal:
        seen &= apart >= 0
    if layout.ranks_q is not None and layout.ranks_k is not None:
        seen &= layout.ranks_k[keys] < layout.ranks_q[queries][:, None]
    scores = sum(
        _terms(given, row, queries, keys, apart),
        start=torch.zeros((), device=queries.device, dtype=given.inputs["q"].dtype),
    )
    scores = (scores * layout.scale).masked_fill(~seen, float("-inf"))
    weights = scores.softmax(-1) if cancels else (scores - scores.logsumexp(-1, keepdim=True).detach()).exp()
    weights = weights.masked_fill(~seen.any(-1, keepdim=True), 0.0)  # a query that sees nothing
    if layout.draws is not None:
        weights = weights * kept_by_formula(layout, queries, len(keys), weights.shape[0]) * layout.inverse
    return weights, keys


def kept_by_formula(layout: Layout, queries: Tensor, keys: int, heads: int) -> Tensor:
    """Return [N, Q, K] bool, true where dropout keeps the probability, by plain operations."""
    assert layout.draws is not None
    places = head_keys(layout.draws[queries], range(heads)).t()
    numbers = numbers16(places, torch.zeros((), dtype=torch.int64), range(keys))
    return numbers >= layout.threshold - 2**15


def _terms(given: Problem, row: int, queries: Tensor, keys: Tensor, apart: Tensor) -> Iterator[Tensor]:
    """Yield the terms of the scores, [N, Q, K] each.

    Products with tables are computed for all distances and then looked up, because a table's rows for each pair of
    tokens would not fit into memory.
    """
    inputs, layout = given.inputs, given.layout
    place = apart if layout.signs is None else apart * layout.signs[row]
    place = (place + layout.center)[None].expand(inputs["q"].shape[1], -1, -1)
    q, k = inputs["q"][queries], inputs["k"][keys]
    yield torch.einsum("qnd,knd->nqk", q, k)
    if "table_a" in inputs:
        r = inputs["r"][queries] if "r" in inputs else q
        yield torch.einsum("qnd,end->nqe", r, inputs["table_a"]).gather(2, place)
    if "table_b" in inputs:
        yield torch.einsum("knd,end->nek", k, inputs["table_b"]).gather(1, place)
    if "table_c" in inputs:
        yield inputs["table_c"].t()[:, None].expand(-1, len(queries), -1).gather(2, place)
    if "segment_scores" in inputs:
        assert layout.segments_q is not None
        assert layout.segments_k is not None
        other = layout.segments_q[queries][:, None] != layout.segments_k[keys]
        same, different = inputs["segment_scores"][queries].movedim(0, -1).unbind(1)
        yield torch.where(other, different[..., None], same[..., None])


def outcome(context: Tensor, given: Problem) -> dict[str, Tensor]:
    """Return the context, and the gradients of a weighted sum of it, by name."""
    weights = torch.linspace(-1, 2, max(1, context.numel()), device=context.device, dtype=torch.float64)
    sums = (context * weights[: context.numel()].view_as(context).to(context.dtype)).sum()
    gradients = torch.autograd.grad(
        sums, list(given.inputs.values()), allow_unused=True, materialize_grads=True
    )
    return {"context": context.detach(), **dict(zip(given.inputs, gradients, strict=True))}


def error(
    found: dict[str, Tensor], exact: dict[str, Tensor], scale: dict[str, Tensor] | None = None
) -> tuple[float, float]:
    """Return the largest relative error of any tensor, and the largest part of an error that is proportional to its
    tensor.

    Rounding causes no proportional error. Errors are relative to `scale` where it is larger than the exact value.
    """
    worst, biased = 0.0, 0.0
    for name, wanted in exact.items():
        if not wanted.numel():
            continue
        ours, size = found[name].double(), float(wanted.norm())
        size = size if scale is None else max(size, float(scale[name].norm()))
        if not bool(ours.isfinite().all()):
            return float("inf"), float("inf")
        off = ours - wanted
        least = 1e-6 * max(1.0, wanted.numel() ** 0.5)  # of a tensor that ought to be 0
        worst = max(worst, float(off.norm()) / max(size, least))
        biased = max(biased, abs(float((off * wanted).sum())) / max(size, least) ** 2)
    return worst, biased
