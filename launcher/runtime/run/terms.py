"""The figures of a record by name: the terms of its loss, and the figures that trackers and TensorBoard show.

A weighted sum of several terms means little to a person, and has no perplexity.
"""

import math
from collections.abc import Mapping
from typing import Any

_LOSS = "_loss"
_KEPT = 0.9  # of a running mean, at each step


def running_mean(before: float | None, value: float) -> float:
    """The mean after one more step: of about the ten newest. A single step says little. None: there is none yet."""
    return value if before is None else _KEPT * before + (1 - _KEPT) * value


def term_losses(record: Mapping[str, Any]) -> dict[str, float]:
    """By term (`mlm`, `rtd`, ...), in nats, of a step's or an evaluation's record; those that are not finite are left
    out. A record without terms has its whole `loss`."""
    named = {name.removesuffix(_LOSS): value for name, value in record.items() if name.endswith(_LOSS)}
    named = named or {"loss": record.get("loss")}
    return {name: float(value) for name, value in named.items() if value is not None and math.isfinite(value)}


def token_term(figures: Mapping[str, Any]) -> str | None:
    """The term that is the loss on hidden tokens: the one that a record's perplexity belongs to. None where no tokens
    are predicted."""
    return next((term for term in ("plm", "mlm") if term + _LOSS in figures), None)


def spell(losses: Mapping[str, float], perplexity: float | None = None) -> str:
    """`mlm 4.467 (perplexity 87.13)  rtd 0.340`."""
    token = token_term({name + _LOSS: loss for name, loss in losses.items()})
    beside = {token: f" (perplexity {perplexity:.2f})"} if token and perplexity is not None else {}
    return "  ".join(f"{name} {loss:.3f}{beside.get(name, '')}" for name, loss in losses.items())


_SUFFIXES = ("loss", "accuracy", "precision", "recall", "replaced", "similarity")


def figures(record: Mapping[str, Any]) -> dict[str, float]:
    """A step's (`train/...`) or an evaluation's (`heldout/...`) figures; those that were not finite are left out.

    The records' schema is in infra/docs/records.md.
    """
    found = {name: value for name, value in record.items() if name.endswith(_SUFFIXES)}
    if record["kind"] == "evaluation":
        return _named("heldout", found | {"perplexity": record.get("perplexity")})
    found |= {name: record.get(name) for name in ("lr", "grad_norm", "data_wait_share", "mfu")}
    found["tokens_per_second"] = record["tokens"] / max(record["seconds"], 1e-9)
    return _named("train", found)


def _named(group: str, found: Mapping[str, Any]) -> dict[str, float]:
    return {f"{group}/{name}": float(value) for name, value in found.items() if value is not None}
