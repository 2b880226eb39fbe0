"""The figures of a record, by the names under which every tracker and TensorBoard show them."""

from collections.abc import Mapping
from typing import Any

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
