"""The live pages. That of a run has the report's tiles, curves and tables, and the run's present state. That of a
folder of runs has a table to choose from, and the curves of the chosen runs over each other."""

from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import quote

from launcher.observe.inspect.report import page
from launcher.observe.inspect.report.chart import TONES, draw
from launcher.observe.inspect.report.curves import ComparedRun, compared
from launcher.observe.inspect.report.style import header, text, tiles
from launcher.observe.inspect.report.summary import Axis
from launcher.observe.inspect.report.tables import moment
from launcher.observe.inspect.status import RunStatus, Unreadable
from launcher.observe.watch.event_words import is_trouble, spell_event
from launcher.observe.watch.html import Sections, ago, axes, facts, guarded, progress, state_badge
from launcher.observe.watch.reader import SeenFolder, SeenRun, View
from launcher.output import human_count, human_duration
from launcher.runtime.run.metrics import STEP, spell
from launcher.runtime.run.step_table import Record

_EVENTS_SHOWN = 60
_ROUTINE = ("commit",)  # not listed among events: checkpoints have a table of their own


def run_sections(seen: SeenRun, axis: Axis) -> Sections:
    """Return the page's sections by name, in order, as HTML."""
    below = guarded("tables", lambda: page.sections(seen.subject, seen.account, folded=True))
    return {
        "head": _head(seen),
        "tiles": guarded("figures", lambda: {"": tiles(_figures(seen))}).get("", ""),
        "charts": axes(axis) + _charts(seen, axis),
        "ranks": _section("Ranks", facts(_ranks(seen))),
        "data": _section("Data service", facts(_data(seen))),
        "events": _events(seen.account.events),
        **below,
    }


def _head(seen: SeenRun) -> str:
    status = seen.status
    ahead = f"about {human_duration(status.eta_seconds)} to go" if status.eta_seconds is not None else ""
    state = state_badge(status.state, status.reason)
    top = header(status.name, state, f"<code>{text(status.uri)}</code>")
    return top + progress(status.step, status.total_steps, ahead)


def _charts(seen: SeenRun, axis: Axis) -> str:
    drawn = guarded("curves", lambda: {"": page.drawings(seen.subject, seen.account, axis, readings=True)})
    return drawn.get("", "") or drawn.get("curves", "")


def _section(title: str, content: str) -> str:
    return f"<h2>{text(title)}</h2>{content}"


def _figures(seen: SeenRun) -> Iterator[tuple[str, str]]:
    status, account = seen.status, seen.account
    for name, loss in status.terms.items():
        yield f"{loss:.3f}", f"{name.upper()} loss, newest steps" if name != "loss" else "loss, newest steps"
    if account.evaluations:
        yield from page.held_out(seen.subject, account.evaluations[-1])
    for metric in STEP:
        if metric.name in status.figures:
            yield metric.spell(status.figures[metric.name]), metric.about("now")
    if seen.waiting is not None:
        yield f"{seen.waiting:.1%}", "of step time waiting for data, now"
    yield human_count(account.summary.tokens_before + account.figures.tokens), "tokens trained on"
    if account.figures.goodput is not None:
        yield f"{account.figures.goodput:.1%}", "goodput: steps that count"
    yield str(len(account.gaps)), f"interruptions, {account.figures.repeated:,} steps repeated"
    if account.figures.skipped:
        yield f"{account.figures.skipped:,}", "steps skipped, gradients not finite or far too large"


def _ranks(seen: SeenRun) -> Iterator[tuple[str, str]]:
    """Yield facts about the training processes: number of ranks, machines, times, checkpoint."""
    status, events = seen.status, seen.account.events
    begun = next((event for event in reversed(events) if event["kind"] in ("start", "resume")), None)
    if begun is not None and "world" in begun:
        yield "ranks", text(f"{begun['world']}, since step {begun.get('step', 0):,}")
    if machines := _machines(events):
        yield "machines", text(", ".join(machines))
    if status.host is not None:
        yield "command", text(f"process {status.pid} on {status.host}, attempt {status.attempt}")
    if status.since is not None:
        yield "since", ago(status.since)
    if status.heard is not None:
        yield "last heartbeat", ago(status.heard)
    if status.stop_requested is not None:
        yield "asked to stop", text(f"by {status.stop_requested}")
    if status.checkpoint is not None:
        yield "newest checkpoint", f"step {status.checkpoint.step:,}, {ago(status.checkpoint.committed)}"
    elif status.checkpoint_problem is not None:
        yield "newest checkpoint", f'<span class="bad">{text(status.checkpoint_problem)}</span>'
    else:
        yield "newest checkpoint", "none yet"
    if status.evaluation_problem is not None:
        yield "evaluation", f'<span class="bad">failed at {text(status.evaluation_problem)}</span>'


def _machines(events: Sequence[Record]) -> list[str]:
    """Return the machines that the newest start examined."""
    found = [event for event in events if event["kind"] == "preflight"]
    newest = max((event["attempt"] for event in found), default=0)
    hosts = [str(event.get("host", "?")) for event in found if event["attempt"] == newest]
    return list(dict.fromkeys(hosts))


def _data(seen: SeenRun) -> Iterator[tuple[str, str]]:
    """Yield facts about the data: how long ranks waited for it, and the corpora."""
    figures = seen.account.figures
    now = "nothing trained yet" if seen.waiting is None else f"{seen.waiting:.2%} of the newest steps' time"
    yield "ranks waited for data", f"{now}, {figures.data_wait:.2%} of all"
    late = [
        event
        for event in seen.account.events
        if event["kind"] == "straggler" and event.get("doing") == "data"
    ]
    if late:
        yield "data came late", text(f"{len(late):,}x, the last time: {spell_event(late[-1])}")
    yield "corpora", text("; ".join(value for name, value in seen.subject.facts.items() if "corpus" in name))
    if seen.status.heldout_terms:
        held_out = spell(seen.status.heldout_terms, seen.status.perplexity)
        yield "held out", text(f"after step {seen.status.evaluated:,}: {held_out}")


def _events(events: Sequence[Record]) -> str:
    """Return the table of the newest events, the newest first."""
    told = [event for event in events if event["kind"] not in _ROUTINE]
    if not told:
        return _section("Events", '<p class="soft">None yet.</p>')
    rows = "".join(map(_event, reversed(told[-_EVENTS_SHOWN:])))
    count = f"{len(told):,} in all, the newest first; checkpoints are below."
    heads = "<tr><th>when (UTC)</th><th>start</th><th>what</th></tr>"
    region = '<div class="table scrolled" tabindex="0" role="region" aria-label="events">'
    listed = f'{region}<table class="events"><thead>{heads}</thead><tbody>{rows}</tbody></table></div>'
    return _section("Events", f'<p class="soft">{count}</p>{listed}')


def _event(event: Record) -> str:
    trouble = ' class="bad"' if is_trouble(event) else ""
    when = moment(float(event["time"]))
    who = str(event["attempt"] or "")
    return f'<tr{trouble}><td class="when">{when}</td><td>{text(who)}</td><td>{text(spell_event(event))}</td></tr>'


MOST = TONES  # largest number of runs whose curves are drawn over each other
_AT_FIRST = 6
_HEADS = ("run", "state", "progress", "loss", "held out", "tokens/s", "checkpoint", "host")


def chosen(folder: SeenFolder, asked: Sequence[str]) -> dict[str, int]:
    """Return the colours of the runs to compare, by name: the runs that were asked for, else those that ran last."""
    names = sorted(folder.runs)
    known = [name for name in dict.fromkeys(asked) if name in folder.runs][:MOST]
    if not asked:
        readable = [name for name in names if isinstance(folder.runs[name], RunStatus)]
        known = sorted(readable, key=lambda name: _liveliness(folder.runs[name]))[:_AT_FIRST]
    tones: dict[str, int] = {}
    for name in sorted(known):  # a run keeps its colour if others are chosen, unless one of them has the same
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
    """Return the page's sections by name, in order, as HTML. `views`: views of the runs to compare, by name."""
    running = sum(isinstance(run, RunStatus) and run.state == "running" for run in folder.runs.values())
    title = uri.rstrip("/").rpartition("/")[2] or uri
    count = f"{len(folder.runs):,} runs, {running:,} running"
    return {
        "head": header(title, "", f"<code>{text(uri)}</code>", count),
        "runs": _table(folder, tones),
        "charts": axes(axis) + _curves(tones, views, axis),
    }


def _liveliness(run: RunStatus | Unreadable) -> tuple[bool, float]:
    """Return a key that sorts running runs first, then others by their last heartbeat, the newest first."""
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
    """Return the path of the page of one of the runs."""
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
