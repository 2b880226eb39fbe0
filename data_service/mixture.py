"""How many samples of an epoch each source gives."""

from collections.abc import Sequence

from data_service.errors import PlanError
from data_service.spec import SourceSpec


def quotas(sources: Sequence[SourceSpec], rows: Sequence[int], granule: int) -> tuple[int, ...]:
    """Samples of each source in an epoch as long as all sources together, in multiples of `granule`; largest
    remainders round up.

    Args:
        sources: with weights, or all without: each is then read once.
        rows: that each source has.
        granule: rows of a step where they continue those of the step before, else 1.

    Raises:
        PlanError: a source has too little for one step of lanes.
    """
    given = [source.weight for source in sources if source.weight is not None]
    if not given and granule == 1:
        return tuple(rows)
    steps = shares(given or rows, sum(rows) // granule)
    for source, share in zip(sources, steps, strict=True):
        if not share and granule > 1:
            raise PlanError(
                f"source {source.name} ({source.uri}) has too little text, or weight, for one step of {granule} lanes "
                f"an epoch",
                remedy="use fewer sequences in a batch, a smaller input.reuse, or more text",
            )
    return tuple(share * granule for share in steps)


def unread(weights: Sequence[float], rows: int) -> dict[int, str]:
    """The sources whose weight is less than a row of an epoch of so many, by number, each with the arithmetic."""
    total = sum(weights)
    return {
        source: f"of the {rows:,} rows of an epoch, its weight of {weights[source]:g} in {total:g} is "
        f"{rows * weights[source] / total:.2g} rows, so none is ever read"
        for source, share in enumerate(shares(weights, rows))
        if not share
    }


def least_weight(weights: Sequence[float], source: int, rows: int) -> float:
    """With which a source gives a row of an epoch."""
    return (sum(weights) - weights[source]) / max(rows - 1, 1)


def shares(weights: Sequence[float], total: int) -> list[int]:
    """`total` divided in proportion to `weights`, in whole numbers; the largest remainders round up."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: counts[source] - exact[source])
    for source in by_remainder[: total - sum(counts)]:
        counts[source] += 1
    return counts
