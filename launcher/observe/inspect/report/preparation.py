"""The page on a preparation: what became of its documents, as one HTML file without references to anything outside it.

It is a function of the statistics alone, so the same preparation leaves the same page, wherever it lies.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import yaml

from data_service.corpus.origin import by_count
from data_service.prepare.statistics import Statistics
from launcher.observe.inspect.report.chart import Chart, Series, draw
from launcher.observe.inspect.report.style import badge, document, header, table, text, tiles
from launcher.output import human_bytes

PAGE = "statistics.html"
_ROWS = 50


def render(statistics: Statistics) -> str:
    """Return the page's HTML."""
    body = [
        header("Prepared documents", badge("complete")),
        tiles(_figures(statistics)),
        _lengths(statistics),
        _stages(statistics),
        _sources(statistics),
        _reasons(statistics),
        _values("Languages", "language", statistics.languages),
        _values("Licences", "licence", statistics.licences),
        _settings(statistics),
    ]
    return document("Prepared documents - Maskfleet", body)


def _figures(statistics: Statistics) -> Iterator[tuple[str, str]]:
    read, kept = statistics.documents_read, statistics.documents_kept
    yield f"{kept:,}", f"documents kept, of {read:,}"
    yield f"{read - kept:,}", f"documents dropped, {_share(read - kept, read)}"
    yield (
        human_bytes(statistics.text_bytes_kept),
        f"of text kept, of {human_bytes(statistics.text_bytes_read)}",
    )
    yield f"{len(statistics.sources):,}", "sources"
    if statistics.searched:
        yield f"{len(statistics.searched):,}", "evaluation sets searched for"


def _share(count: int, of: int) -> str:
    return f"{count / max(1, of):.1%}"


def _lengths(statistics: Statistics) -> str:
    """Return the curves of the lengths of documents, read and kept; nothing if they were not counted."""
    if not statistics.lengths_read:
        return ""
    lowest, highest = min(statistics.lengths_read), max([*statistics.lengths_read, *statistics.lengths_kept])
    steps = range(math.frexp(lowest)[1] - 1, math.frexp(highest)[1])
    series = tuple(
        Series(
            name,
            np.array(steps, dtype=np.float64),
            np.array([counts.get(1 << step, 0) for step in steps], dtype=np.float64),
            tone,
            dots=True,
        )
        for name, counts, tone in (("read", statistics.lengths_read, 2), ("kept", statistics.lengths_kept, 1))
    )
    chart = Chart(
        "Lengths",
        "documents",
        series,
        x_start=float(steps.start),
        x_end=float(max(steps.stop - 1, steps.start + 1)),
        zero=True,
        format=lambda value: f"{value:,.0f}",
        x_name="characters, to twice as many",
        x_format=lambda step: f"{2**step:,.0f}",
    )
    return f'<div class="charts">{draw(chart)}</div>'


def _stages(statistics: Statistics) -> str:
    rows = []
    for stage in statistics.stages:
        dropped = stage.entered - stage.left
        counts = (f"{stage.entered:,}", f"{dropped:,}", _share(dropped, stage.entered), f"{stage.changed:,}")
        cut = [f"cut: {_most(stage.cut)}"] if stage.cut else []
        rows.append((stage.stage, *counts, "; ".join(filter(None, [_most(stage.dropped), *cut]))))
    heads = ("stage", "documents", "dropped", "share", "changed", "reasons")
    return "<h2>Stages</h2>" + table(heads, rows, 1)


def _most(counts: Mapping[str, int]) -> str:
    """Return reasons and their numbers, the most frequent first."""
    ordered = by_count(counts)
    more = f" and {len(ordered) - _ROWS:,} more" if len(ordered) > _ROWS else ""
    return ", ".join(f"{reason} {count:,}" for reason, count in ordered[:_ROWS]) + more


def _sources(statistics: Statistics) -> str:
    rows = [
        (
            name,
            *(f"{count:,}" for count in (each.documents_read, each.documents_kept)),
            _share(each.documents_read - each.documents_kept, each.documents_read),
            *(human_bytes(size) for size in (each.text_bytes_read, each.text_bytes_kept)),
        )
        for name, each in statistics.sources.items()
    ]
    heads = ("source", "read", "kept", "dropped", "text read", "text kept")
    return "<h2>Sources</h2>" + table(heads, rows, 1)


def _reasons(statistics: Statistics) -> str:
    """Return what was dropped: a row a source, stage and reason."""
    rows = [
        (name, stage, reason, f"{count:,}", _share(count, source.documents_read))
        for name, source in statistics.sources.items()
        for stage, reasons in source.dropped.items()
        for reason, count in by_count(reasons)
    ]
    if not rows:
        return '<h2>Dropped</h2><p class="soft">None.</p>'
    return "<h2>Dropped</h2>" + _first(("source", "stage", "reason", "documents", "of its source"), rows, 3)


def _values(title: str, name: str, counts: Mapping[str, int]) -> str:
    total = sum(counts.values())
    rows = [(value or "(none)", f"{count:,}", _share(count, total)) for value, count in counts.items()]
    return f"<h2>{title}</h2>" + _first((name, "documents kept", "share"), rows, 1)


def _first(heads: Sequence[str], rows: Sequence[Sequence[str]], number: int) -> str:
    """Return a table of the first rows, and how many more there are."""
    more = len(rows) - _ROWS
    note = f'<p class="soft">and {more:,} more, in statistics.json</p>' if more > 0 else ""
    return table(heads, rows[:_ROWS], number) + note


def _settings(statistics: Statistics) -> str:
    shown = yaml.safe_dump(statistics.preparation, sort_keys=False, allow_unicode=True)
    escaped = "\n".join(map(text, shown.split("\n")))
    summary = "<summary>settings and inputs</summary>"
    return f"<h2>Settings</h2><details>{summary}<pre>{escaped}</pre></details>"
