"""Random inputs for the fused attention in every form that a model family needs, and how far off an outcome is."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tests.support.models import relative_attention
from tests.support.models.relative_attention import Form, Problem

_XLNET = Form(table_a=True, own_r=True, segments=True, order=True, carried=1)
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
"""By name. A size says how many heads there are and how wide, and how many tokens are carried if any are."""


@dataclass(frozen=True)
class Size:
    """The size of a problem: lengths of its rows, number and width of its heads; `scores` multiplies the scores."""

    lengths: tuple[int, ...]
    heads: int
    width: int
    dtype: torch.dtype
    dropout: float = 0.0
    scores: float = 1.0


def problem(form: Form, size: Size, device: torch.device) -> Problem:
    """Return a random problem, the same on any device."""
    longest = max(size.lengths, default=0)
    carried = (longest // 4 // 4 * 4 if longest >= 16 else 3) if form.carried else 0
    sized = replace(form, heads=size.heads, width=size.width, dtype=size.dtype, dropout=size.dropout, carried=carried)
    scale = size.scores * size.width**-0.5
    return relative_attention.problem(size.lengths, sized, scale=scale, device=device)


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
