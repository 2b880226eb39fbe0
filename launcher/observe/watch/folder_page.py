"""The live page of a folder of runs: a table to choose from, and the chosen runs' curves over each other."""

from collections.abc import Mapping, Sequence
from urllib.parse import quote

from launcher.format import human_count, human_duration
from launcher.observe.inspect.report.chart import TONES, draw
from launcher.observe.inspect.report.curves import ComparedRun, compared
from launcher.observe.inspect.report.summary import Axis
from launcher.observe.inspect.status import RunStatus, Unreadable
from launcher.observe.watch.html import Sections, ago, axes, guarded, progress, state_badge, text
from launcher.observe.watch.reader import SeenFolder, SeenRun
from launcher.observe.watch.watched import View
from launcher.runtime.run.terms import spell

MOST = TONES  # runs whose curves lie over each other
_AT_FIRST = 6
_HEADS = ("run", "state", "progress", "loss", "held out", "tokens/s", "checkpoint", "host")


def chosen(folder: SeenFolder, asked: Sequence[str]) -> dict[str, int]:
    """The runs to compare and the colour of each: those that were asked for, or the ones that ran last."""
    names = sorted(folder.runs)
    known = [name for name in dict.fromkeys(asked) if name in folder.runs][:MOST]
    if not asked:
        readable = [name for name in names if isinstance(folder.runs[name], RunStatus)]
        known = sorted(readable, key=lambda name: _liveliness(folder.runs[name]))[:_AT_FIRST]
    tones: dict[str, int] = {}
    for name in sorted(known):  # a run keeps its colour whichever others are chosen, as far as that goes
        own = names.index(name) % TONES
        free = ((own + shift) % TONES + 1 for shift in range(TONES))
        tones[name] = next(tone for tone in free if tone not in tones.values())
    return tones


def folder_sections(
    uri: str,
    folder: SeenFolder,
    tones: Mapping[str, int],
    views: Mapping[str, View[SeenRun]],
    axis: Axis,
) -> Sections:
    """The page's sections by name, in order, as HTML. `views`: of the runs to compare."""
    running = sum(isinstance(run, RunStatus) and run.state == "running" for run in folder.runs.values())
    title = text(uri.rstrip("/").rpartition("/")[2] or uri)
    count = f"{len(folder.runs):,} runs, {running:,} running"
    head = f'<header><h1>{title}</h1></header><p class="soft"><code>{text(uri)}</code><br>{count}</p>'
    return {
        "head": head,
        "runs": _table(folder, tones),
        "charts": axes(axis) + _curves(tones, views, axis),
    }


def _liveliness(run: RunStatus | Unreadable) -> tuple[bool, float]:
    """Running ones first, then those last heard of."""
    if isinstance(run, Unreadable):
        return True, 0.0
    return run.state != "running", -(run.heard or 0.0)


def _table(folder: SeenFolder, tones: Mapping[str, int]) -> str:
    heads = "".join(f"<th>{head}</th>" for head in _HEADS)
    rows = "".join(_row(name, run, tones.get(name)) for name, run in folder.runs.items())
    note = f'<p class="soft">Choose up to {MOST} runs to lay their curves over each other.</p>'
    button = '<noscript><button type="submit">compare</button></noscript>'
    table = f'<div class="table"><table class="runs"><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
    return f'<form class="choose" method="get">{table}{note}{button}</form>'


def _row(name: str, run: RunStatus | Unreadable, tone: int | None) -> str:
    checked = " checked" if tone is not None else ""
    swatch = f'<span class="key s{tone}"></span>' if tone is not None else '<span class="key none"></span>'
    box = (
        f'<input type="checkbox" name="run" value="{text(name)}" aria-label="compare {text(name)}"{checked}>'
    )
    link = f'<a href="{text(link_to(name))}">{text(name)}</a>'
    cells = [f'<span class="choice">{box}{swatch}{link}</span>', *_cells(run)]
    marked = (f'<td data-head="{head}">{cell}</td>' for head, cell in zip(_HEADS, cells, strict=True))
    return f"<tr>{''.join(marked)}</tr>"


def _cells(run: RunStatus | Unreadable) -> list[str]:
    if isinstance(run, Unreadable):
        return [state_badge("unreadable", run.problem), *[""] * 6]
    ahead = f"{human_duration(run.eta_seconds)} to go" if run.eta_seconds is not None else ""
    checkpoint = (
        "" if run.checkpoint is None else f"step {run.checkpoint.step:,}, {ago(run.checkpoint.committed)}"
    )
    return [
        state_badge(run.state, run.reason),
        progress(run.step, run.total_steps, ahead),
        text(spell(run.terms)),
        text(spell(run.heldout_terms)),
        "" if run.tokens_per_second is None else human_count(run.tokens_per_second),
        checkpoint,
        text(run.host) if run.host and run.state == "running" else "",
    ]


def link_to(name: str) -> str:
    """The page of one of the runs."""
    return f"/run/{quote(name, safe='')}"


def _curves(tones: Mapping[str, int], views: Mapping[str, View[SeenRun]], axis: Axis) -> str:
    runs = [
        ComparedRun(name, tones[name], view.value.account)
        for name, view in sorted(views.items())
        if view.value is not None
    ]
    waiting = [name for name, view in views.items() if view.value is None and view.error is None]
    failed = [f"{name}: {view.error}" for name, view in views.items() if view.error is not None]
    notes = [f"Reading {', '.join(waiting)}."] if waiting else []
    notes += [f"Not read anew: {'; '.join(failed)}"] if failed else []
    said = "".join(f'<p class="notice">{text(note)}</p>' for note in notes)
    drawn = guarded(
        "curves", lambda: {"": "".join(draw(chart, readings=True) for chart in compared(runs, axis))}
    )
    figures = "".join(drawn.values())
    empty = "" if figures or waiting else '<p class="soft">Nothing to draw yet.</p>'
    return f'{said}{empty}<div class="charts">{figures}</div>'
