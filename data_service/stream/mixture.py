"""The number of samples of an epoch that come from each source."""

from collections import Counter
from collections.abc import Sequence
from decimal import Decimal, localcontext

from data_service.errors import PlanError
from data_service.samples.spec import SourceSpec

_DECIMAL_DIGITS = 28  # digits of decimal arithmetic, which gives the same weights on every machine


def source_weights(
    sources: Sequence[SourceSpec], sizes: Sequence[int], temperature: float, translations: float | None = None
) -> list[float] | None:
    """Return the sources' weights; None if each source is to be read once.

    They are the given weights, or else proportional to size ** (1 / T) for the temperature T (Devlin 2018, multilingual
    BERT; Conneau et al. 2020, section 3.1). The sources of one language share one weight in proportion to their sizes;
    so do translations between the same two languages.

    `translations`: share of translations in all samples, whatever their sizes; text and translations are then each
    mixed by temperature. None: translations are mixed with text.
    """
    given = [source.weight for source in sources if source.weight is not None]
    if given or (temperature == 1 and translations is None):
        return given or None
    with localcontext() as context:
        context.prec = _DECIMAL_DIGITS
        drawn = _temperature_weights(sources, sizes, temperature)
        if translations is not None:
            drawn = _scale_translations(sources, drawn, Decimal(translations))
        return list(map(float, drawn))


def _temperature_weights(sources: Sequence[SourceSpec], sizes: Sequence[int], temperature: float) -> list[Decimal]:
    """Return each source's share of its language's size ** (1 / T). A source without a language stands alone."""
    groups = [source.languages or (f"source {source.name}", "", "") for source in sources]
    totals = Counter[tuple[str, ...]]()
    for group, size in zip(groups, sizes, strict=True):
        totals[group] += size
    tempered = {group: Decimal(total) ** (1 / Decimal(temperature)) for group, total in totals.items()}
    return [
        tempered[group] if size == totals[group] else tempered[group] * size / totals[group]
        for group, size in zip(groups, sizes, strict=True)
    ]


def _scale_translations(
    sources: Sequence[SourceSpec], weights: Sequence[Decimal], translations: Decimal
) -> list[Decimal]:
    """Return `weights`, scaled so that translations have the share `translations`, if there are text and
    translations."""
    totals = {
        kind: sum(
            (weight for source, weight in zip(sources, weights, strict=True) if source.is_translation == kind),
            start=Decimal(0),
        )
        for kind in (True, False)
    }
    if not all(totals.values()):
        return list(weights)
    shares = {True: translations, False: 1 - translations}
    return [
        weight * shares[source.is_translation] / totals[source.is_translation]
        for source, weight in zip(sources, weights, strict=True)
    ]


def fill_weights(
    configured: Sequence[float | None],
    sources: Sequence[SourceSpec],
    sizes: Sequence[int],
    temperature: float,
    translations: float | None = None,
) -> list[float]:
    """Return `configured` with a weight in place of each None.

    At least one weight is None; the others add up to less than 1. The sources without weight share the rest in the
    proportions of their `source_weights`.
    """
    own = [size for size, weight in zip(sizes, configured, strict=True) if weight is None]
    unweighted = [
        source.model_copy(update={"weight": None})
        for source, weight in zip(sources, configured, strict=True)
        if weight is None
    ]
    drawn = source_weights(unweighted, own, temperature, translations) or own
    left, total = 1 - sum(weight for weight in configured if weight is not None), sum(drawn)
    filled = iter([left * weight / total for weight in drawn])
    return [next(filled) if weight is None else weight for weight in configured]


def mixed_batch_quotas(
    sources: Sequence[SourceSpec], weights: Sequence[float] | None, rows: Sequence[int], multiple: int
) -> tuple[int, ...]:
    """Return each source's number of samples in an epoch whose batches mix sources, as long as all sources together.

    The numbers are multiples of `multiple`. Shares with the largest remainders are rounded up.

    `weights`: None to read each source once. `multiple`: number of rows in a step if they continue those of the step
    before, else 1.

    Raises PlanError: a source does not fill one step of lanes.
    """
    if weights is None and multiple == 1:
        return tuple(rows)
    steps = round_shares(weights or rows, sum(rows) // multiple)
    for source, share in zip(sources, steps, strict=True):
        if not share and multiple > 1:
            raise PlanError(
                f"source {source.name} ({source.uri}) has too little text or weight for one step of {multiple} lanes "
                f"in an epoch",
                remedy="use fewer sequences in a batch, a smaller input.reuse, or more text",
            )
    return tuple(share * multiple for share in steps)


def one_source_batch_quotas(
    sources: Sequence[SourceSpec],
    rows: Sequence[int],
    batch: int,
    temperature: float,
    translations: float | None = None,
) -> tuple[int, ...]:
    """Return the number of samples of each source in an epoch in which each batch (`batch` samples) is from one source.

    An epoch has as many batches as possible in the proportion of the weights without repeating a row. The source with
    the fewest batches for its weight decides the length of the epoch; the other sources continue in the next epoch.
    Where weights follow from sizes, a source's size is the number of its whole batches. Without weights and temperature
    an epoch takes all whole batches.

    Raises:
        PlanError: a source has fewer rows than a batch, or its weight gives it less than one batch in an epoch.
    """
    whole = [count // batch for count in rows]
    for source, count in zip(sources, rows, strict=True):
        if count < batch:
            raise PlanError(
                f"source {source.name} ({source.uri}) has {count:,} rows, less than one batch of {batch:,}",
                remedy=f"use a batch of {count:,} or less, leave the source out, or let batches mix their sources",
            )
    weights = source_weights(sources, whole, temperature, translations)
    if weights is None:
        return tuple(count * batch for count in whole)
    total = int(min(count * sum(weights) / weight for count, weight in zip(whole, weights, strict=True)))
    counts = [min(share, most) for share, most in zip(round_shares(weights, total), whole, strict=True)]
    for number, (source, count) in enumerate(zip(sources, counts, strict=True)):
        if not count:
            raise PlanError(
                f"source {source.name} ({source.uri}) would give no batch: an epoch has only {total:,} batches, "
                f"because another source has rows for no more, and a weight of {weights[number]:g} in "
                f"{sum(weights):g} is less than one of these batches",
                remedy="raise its weight, lower the weight of a source with few rows, or use a smaller batch",
            )
    return tuple(count * batch for count in counts)


def unread_sources(weights: Sequence[float], rows: int) -> dict[int, str]:
    """Return explanations of the sources that give no row to an epoch of `rows` rows, by source number."""
    total = sum(weights)
    return {
        source: f"of the {rows:,} rows of an epoch, its weight of {weights[source]:g} in {total:g} is "
        f"{rows * weights[source] / total:.2g} rows, so none is ever read"
        for source, share in enumerate(round_shares(weights, rows))
        if not share
    }


def min_weight(weights: Sequence[float], source: int, rows: int) -> float:
    """Return the smallest weight with which a source gives one of the `rows` rows of an epoch."""
    return (sum(weights) - weights[source]) / max(rows - 1, 1)


def round_shares(weights: Sequence[float], total: int) -> list[int]:
    """Return whole numbers that add up to `total`, in proportion to `weights`. Largest remainders are rounded up."""
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(share) for share in exact]
    by_remainder = sorted(range(len(exact)), key=lambda source: counts[source] - exact[source])
    for source in by_remainder[: total - sum(counts)]:
        counts[source] += 1
    return counts
