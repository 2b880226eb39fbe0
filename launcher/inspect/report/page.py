"""The report: one HTML file that stands alone. What happened in a run, for the person who has to judge it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape

from launcher.diagnose.results import Evaluated
from launcher.evaluate.render import heads, lines
from launcher.evaluate.table import Row
from launcher.format import human_count, human_duration
from launcher.inspect.report.chart import draw
from launcher.inspect.report.curves import charts
from launcher.inspect.report.evaluations import evaluations
from launcher.inspect.report.figures import Figures, Interruption, interruptions, measure
from launcher.inspect.report.style import CSS, table
from launcher.inspect.report.timeline import draw_timeline
from launcher.run.history import History
from launcher.run.log import token_loss
from launcher.run.step_table import Record

_DAMAGE_SHOWN = 12


@dataclass(frozen=True)
class Subject:
    """What the page is about.

    Attributes:
        name, uri, created: of the run.
        total_steps: what the recipe asks for.
        recipe: its YAML text.
        facts: further lines for the last section: fingerprints, versions.
        baselines: reference losses on the held-out targets in nats, by name ("unigram", "left bigram").
        beside: what was measured of its commits beside training.
        evaluated: what `maskfleet evaluate` found about its checkpoints.
    """

    name: str
    uri: str
    created: str
    total_steps: int
    recipe: str
    facts: dict[str, str]
    baselines: dict[str, float]
    beside: tuple[Evaluated, ...] = ()
    evaluated: Sequence[Row] = ()


def render(subject: Subject, history: History, now: datetime) -> str:
    """The page's HTML."""
    figures, gaps = measure(history), interruptions(history)
    marks = tuple(float(gap.resumed_from) for gap in gaps if gap.resumed_from is not None)
    curves = "".join(map(draw, charts(history, subject.baselines, marks)))  # no chart outlives its drawing
    sections = [
        _header(subject, history, figures, now),
        _tiles(subject, history, figures, gaps),
        f'<div class="charts">{curves}{draw_timeline(history)}</div>',
        evaluations(subject.beside, history.events),
        _evaluated(subject.evaluated),
        _interruptions(gaps),
        _rewinds([event for event in history.events if event["kind"] == "rewind"]),
        _worlds([event for event in history.events if event["kind"] == "world"]),
        _checkpoints([event for event in history.events if event["kind"] == "commit"]),
        _nodes(history.events),
        _damage(history.damage),
        _changes([event for event in history.events if event["kind"].endswith("_changed")]),
        _configuration(subject),
    ]
    title = escape(f"{subject.name} - Maskfleet")
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    body = f"<body><main>{''.join(sections)}</main></body>"
    return f'<!doctype html><html lang="en"><head>{head}<style>{CSS}</style></head>{body}</html>\n'


def _header(subject: Subject, history: History, figures: Figures, now: datetime) -> str:
    done = figures.steps >= subject.total_steps
    ended = [event["kind"] for event in history.events if event["kind"] in ("start", "resume", "stop")]
    state = "finished" if done else "stopped" if ended[-1:] == ["stop"] else "not finished"
    badge = f'<span class="state{"" if done else " open"}">{state}</span>'
    when = f"created {escape(subject.created)}, report of {now.astimezone(UTC).isoformat(timespec='seconds')}"
    return (
        f"<header><h1>{escape(subject.name)}</h1>{badge}</header>"
        f'<p class="soft"><code>{escape(subject.uri)}</code><br>{when}</p>'
    )


def _tiles(subject: Subject, history: History, figures: Figures, gaps: Sequence[Interruption]) -> str:
    tiles = [(f"{figures.steps:,}", f"of {subject.total_steps:,} steps")]
    if history.evaluations:
        loss = token_loss(history.evaluations[-1])
        perplexity = history.evaluations[-1].get("perplexity")
        what = "" if perplexity is None else f" on hidden tokens, perplexity {perplexity:.1f}"
        tiles.append((f"{loss:.3f}", f"held-out loss{what}"))
        for name, baseline in subject.baselines.items():
            side = "below" if loss <= baseline else "above"
            tiles.append((f"{abs(baseline - loss):.2f} nat", f"{side} the {name} baseline"))
    goodput = "-" if figures.goodput is None else f"{figures.goodput:.1%}"
    tiles += [
        (human_count(figures.tokens), "tokens trained on"),
        (human_count(figures.tokens_per_second), "tokens/s, median step"),
        (f"{figures.data_wait:.1%}", "of step time waiting for data"),
        (human_duration(figures.wall_seconds), "wall time"),
        (goodput, "goodput: steps that count"),
        (str(len(gaps)), f"interruptions, {figures.repeated:,} steps repeated"),
    ]
    if figures.skipped:
        tiles.append((f"{figures.skipped:,}", "steps skipped, gradients not finite or far too large"))
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{b}</b><span>{s}</span></div>' for b, s in tiles)
        + "</div>"
    )


def _evaluated(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    shown = [line[1:] for line in lines(rows)]
    note = "Of each task the settings with the best median over seeds on its dev split; figures x 100."
    return f'<h2>Evaluation</h2><p class="soft">{note}</p>' + table(heads()[1:], shown, 3)


def _interruptions(gaps: Sequence[Interruption]) -> str:
    if not gaps:
        return '<h2>Interruptions</h2><p class="soft">None.</p>'
    rows = [
        (
            _time(gap.time),
            str(gap.attempt),
            gap.cause,
            "not yet" if gap.resumed_from is None else f"{gap.resumed_from:,}",
            "-" if gap.lost is None else f"{gap.lost:,}",
            "-" if gap.downtime is None else human_duration(gap.downtime),
            ", ".join(f"{part} {seconds:.1f} s" for part, seconds in gap.recovery.items()) or "-",
        )
        for gap in gaps
    ]
    heads = ("when (UTC)", "attempt", "cause", "resumed at step", "steps lost", "gap", "its last part")
    return "<h2>Interruptions</h2>" + table(heads, rows, 2)


def _rewinds(events: Sequence[Record]) -> str:
    if not events:
        return ""
    rows = [
        (
            _time(float(event["time"])),
            f"{event['step']:,}",
            f"{event['to']:,}",
            f"{event['samples']:,}",
            "; ".join(f"epoch {epoch}: {start:,} to {stop:,}" for _, epoch, start, stop in event["skipped"]),
            event["reason"],
        )
        for event in events
    ]
    heads = ("when (UTC)", "from step", "back to", "samples left out", "which", "cause")
    return "<h2>Going back</h2>" + table(heads, rows, 1)


def _worlds(changes: Sequence[Record]) -> str:
    if not changes:
        return ""
    rows = [
        (_time(float(event["time"])), f"{event['from']:,}", f"{event['to']:,}", event["cause"])
        for event in changes
    ]
    return "<h2>Number of ranks</h2>" + table(("when (UTC)", "from", "to", "cause"), rows, 1)


def _checkpoints(commits: Sequence[Record]) -> str:
    if not commits:
        return '<h2>Checkpoints</h2><p class="soft">None committed yet.</p>'
    rows = [
        (
            _time(float(event["time"])),
            f"{event['step']:,}",
            f"{float(event['seconds']):.2f} s",
            f"{float(event['blocked']) * 1e3:.0f} ms",
        )
        for event in commits[-12:]
    ]
    blocked = sum(float(event["blocked"]) for event in commits)
    line = (
        f"{len(commits):,} committed, training kept waiting for {human_duration(blocked)} in all; the newest:"
    )
    heads = ("when (UTC)", "step", "written in", "training waited")
    return f'<h2>Checkpoints</h2><p class="soft">{line}</p>' + table(heads, rows, 1)


def _nodes(events: Sequence[Record]) -> str:
    """What was found wrong with machines: by their preflight, by ranks that were slow, by weights that differed; what
    every start finds anew, once."""
    first: dict[tuple[str, str], float] = {}
    for event in events:
        for complaint in _complaints(event):
            first.setdefault(complaint, float(event["time"]))
    rows = [(_time(time), machine, text) for (machine, text), time in first.items()]
    return "<h2>Machines</h2>" + table(("when (UTC)", "machine", "what"), rows, 3) if rows else ""


def _complaints(event: Record) -> Iterator[tuple[str, str]]:
    """(machine, what is wrong with it)."""
    match event["kind"]:
        case "preflight" | "unfit":
            for problem in event["problems"]:
                yield event["host"], f"preflight: {problem}"
        case "straggler":
            what = "its data come late" if event["doing"] == "data" else "it computes slowly"
            yield (
                event["host"],
                f"rank {event['rank']} held up the others, {event['ratio']:.1f} times: {what}",
            )
        case "corruption":
            known = zip(event["hosts"], event["ranks"], strict=True)
            found = [(host, f"weights of rank {rank} were corrupt") for host, rank in known]
            yield from found or [("unknown", "weights of two ranks differed")]


def _changes(events: Sequence[Record]) -> str:
    if not events:
        return ""
    rows = [
        (
            _time(float(event["time"])),
            "identity" if event["kind"] == "identity_changed" else "operation",
            line,
        )
        for event in events
        for line in event["changes"]
    ]
    return "<h2>Changes on record</h2>" + table(("when (UTC)", "kind", "change"), rows, 3)


def _damage(lines: Sequence[str]) -> str:
    """At the end of the drawing: only then every field has been read."""
    if not lines:
        return ""
    first = [(line,) for line in lines[:_DAMAGE_SHOWN]]
    count = f"{len(lines):,} records or objects could not be read; the page is made without them."
    return f'<h2>Damaged records</h2><p class="soft">{count}</p>' + table(("what",), first, 1)


def _configuration(subject: Subject) -> str:
    rows = [(name, value) for name, value in subject.facts.items()]
    recipe = f"<summary>recipe.yaml, as resolved</summary><pre>{escape(subject.recipe)}</pre>"
    return "<h2>Configuration</h2>" + table(("what", "value"), rows, 2) + f"<details open>{recipe}</details>"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
