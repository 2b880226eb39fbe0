"""How many samples of an epoch each source gives."""

from collections import Counter
from collections.abc import Sequence
from decimal import Decimal, localcontext

from data_service.errors import PlanError
from data_service.samples.spec import SourceSpec

_DIGITS = 28  # of the arithmetic of temperatures: the same on every machine


def weights_of(
    sources: Sequence[SourceSpec], sizes: Sequence[int], temperature: float, translations: float | None = None
) -> list[float] | None:
    """Return the sources' weights, or by temperature T those in proportion to size ** (1 / T) (Devlin 2018,
    multilingual BERT; Conneau et al. 2020, section 3.1). None where each source is to be read once.

    The sources of one language are drawn as one, and share that by size; so are those of translations between the same
    two. `translations`: the share of these in all, whatever their sizes; each side is mixed by temperature.
    """
    given = [source.weight for source in sources if source.weight is not None]
    if given or (temperature == 1 and translations is None):
        return given or None
    with localcontext() as context:
        context.prec = _DIGITS
        drawn = _by_temperature(sources, sizes, temperature)
        if translations is not None:
            drawn = _shared_out(sources, drawn, Decimal(translations))
        return list(map(float, drawn))


def _by_temperature(sources: Sequence[SourceSpec], sizes: Sequence[int], temperature: float) -> list[Decimal]:
    """Return each source's part of its language's size ** (1 / T); a source without languages is alone."""
    groups = [source.languages or (f"source {source.name}", "", "") for source in sources]
    totals = Counter[tuple[str, ...]]()
    for group, size in zip(groups, sizes, strict=True):
        totals[group] += size
    tempered = {group: Decimal(total) ** (1 / Decimal(temperature)) for group, total in totals.items()}
    return [
        tempered[group] if size == totals[group] else tempered[group] * size / totals[group]
        for group, size in zip(groups, sizes, strict=True)
    ]


def _shared_out(
    sources: Sequence[SourceSpec], weights: Sequence[Decimal], translations: Decimal
) -> list[Decimal]:
    """Return `weights`, scaled so that those of translations are `translations` of all, where there are both kinds."""
    totals = {
        kind: sum(
            (weight for source, weight in zip(sources, weights, strict=True) if source.translated == kind),
            start=Decimal(0),
        )
        for kind in (True, False)
    }
    if not all(totals.values()):
        return list(weights)
    shares = {True: translations, False: 1 - translations}
    return [
        weight * shares[source.translated] / totals[source.translated]
        for source, weight in zip(sources, weights, strict=True)
    ]


def quotas(
    sources: Sequence[SourceSpec], weights: Sequence[float] | None, rows: Sequence[int], granule: int
) -> tuple[int, ...]:
    """Return samples of each source in an epoch as long as all sources together, in multiples of `granule`; largest
    remainders round up.

    Args:
        sources: for messages.
        weights: of each source; None: each is read once.
        rows: rows of each source.
        granule: rows of a step if they continue those of the step before, else 1.

    Raises:
        PlanError: a source has too little for one step of lanes.
    """
    if weights is None and granule == 1:
        return tuple(rows)
    steps = shares(weights or rows, sum(rows) // granule)
    for source, share in zip(sources, steps, strict=True):
        if not share and granule > 1:
            raise PlanError(
                f"source {source.name} ({source.uri}) has too little text, or weight, for one step of {granule} lanes "
                f"an epoch",
                remedy="use fewer sequences in a batch, a smaller input.reuse, or more text",
            )
    return tuple(share * granule for share in steps)


def source_quotas(
    sources: Sequence[SourceSpec],
    rows: Sequence[int],
    batch: int,
    temperature: float,
    translations: float | None = None,
) -> tuple[int, ...]:
    """Return samples of each source in an epoch whose batches, of `batch` samples each, are of one source each.

    An epoch has as many batches as possible, in the proportion of the weights, without any row twice. The source with
    the fewest batches for its weight decides where it ends; the other sources' rows go on in the next epoch. Where a
    source's size decides its weight, its size is the number of its whole batches; without a temperature all of these
    are taken.

    Raises:
        PlanError: a source has less than a batch, or less than a batch's weight in an epoch.
    """
    whole = [count // batch for count in rows]
    for source, count in zip(sources, rows, strict=True):
        if count < batch:
            raise PlanError(
                f"source {source.name} ({source.uri}) has {count:,} rows, less than one batch of {batch:,}",
                remedy=f"use a batch of {count:,} or less, leave the source out, or let batches mix their sources",
            )
    weights = weights_of(sources, whole, temperature, translations)
    if weights is None:
        return tuple(count * batch for count in whole)
    total = int(min(count * sum(weights) / weight for count, weight in zip(whole, weights, strict=True)))
    counts = [min(share, most) for share, most in zip(shares(weights, total), whole, strict=True)]
    for number, (source, count) in enumerate(zip(sources, counts, strict=True)):
        if not count:
            raise PlanError(
                f"source {source.name} ({source.uri}) would give no batch: an epoch has {total:,} batches, because "
                f"another source then has no more rows for its weight, and a weight of {weights[number]:g} in "
                f"{sum(weights):g} is less than one of them",
                remedy="raise its weight, lower that of a source with few rows, or use a smaller batch",
            )
    return tuple(count * batch for count in counts)


def unread(weights: Sequence[float], rows: int) -> dict[int, str]:
    """Return the sources whose weight is less than a row of an epoch of so many, by number, each with the
    arithmetic."""
    total = sum(weights)
    return {
        source: f"of the {rows:,} rows of an epoch, its weight of {weights[source]:g} in {total:g} is "
        f"{rows * weights[source] / total:.2g} rows, so none is ever read"
        for source, share in enumerate(shares(weights, rows))
        if not share
    }


def least_weight(weights: Sequence[float], source: int, rows: int) -> float:
    """Return the smallest weight with which a source gives a row of an epoch."""
    return (sum(weights) - weights[source]) / max(rows - 1, 1)


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Return `total` divided in proportion to `weights`, in whole numbers; the largest remainders round up."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: counts[source] - exact[source])
    for source in by_remainder[: total - sum(counts)]:
        counts[source] += 1
    return counts
