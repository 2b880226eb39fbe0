"""The report's tables: interruptions, rewinds, numbers of ranks, checkpoints, machines, changes and damage."""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from launcher.observe.inspect.report.figures import Interruption
from launcher.observe.inspect.report.style import table
from launcher.output import human_duration
from launcher.runtime.run.step_table import Record

_DAMAGE_SHOWN = 12


def interruptions(gaps: Sequence[Interruption]) -> str:
    if not gaps:
        return '<h2>Interruptions</h2><p class="soft">None.</p>'
    rows = [
        (
            moment(gap.time),
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


def rewinds(events: Sequence[Record]) -> str:
    if not events:
        return ""
    rows = [
        (
            moment(float(event["time"])),
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


def worlds(changes: Sequence[Record]) -> str:
    if not changes:
        return ""
    rows = [
        (moment(float(event["time"])), f"{event['from']:,}", f"{event['to']:,}", event["cause"])
        for event in changes
    ]
    return "<h2>Number of ranks</h2>" + table(("when (UTC)", "from", "to", "cause"), rows, 1)


def checkpoints(commits: Sequence[Record]) -> str:
    if not commits:
        return '<h2>Checkpoints</h2><p class="soft">None committed yet.</p>'
    rows = [
        (
            moment(float(event["time"])),
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


def nodes(events: Sequence[Record]) -> str:
    """Return the table of problems of machines: those found by preflights, slow ranks, and corrupt weights. A problem
    that every start finds is shown once."""
    first: dict[tuple[str, str], float] = {}
    for event in events:
        for complaint in _complaints(event):
            first.setdefault(complaint, float(event["time"]))
    rows = [(moment(time), machine, text) for (machine, text), time in first.items()]
    return "<h2>Machines</h2>" + table(("when (UTC)", "machine", "what"), rows, 3) if rows else ""


def _complaints(event: Record) -> Iterator[tuple[str, str]]:
    """Yield the machines in an event, each with its problem."""
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
        case "memory_failed" | "memory_unshared" if "host" in event:
            yield event["host"], f"copies in memory: {event['reason']}"
        case "corruption":
            known = zip(event["hosts"], event["ranks"], strict=True)
            found = [(host, f"weights of rank {rank} were corrupt") for host, rank in known]
            yield from found or [("unknown", "weights of two ranks differed")]


def _changed(event: Record) -> list[str]:
    """Return the lines of an event about a change."""
    if event["kind"] == "removals":
        return [f"from step {event['step']:,} on without removed documents of {', '.join(event['states'])}"]
    return list(event["changes"])


def changes(events: Sequence[Record]) -> str:
    if not events:
        return ""
    kinds = {"identity_changed": "identity", "recipe_changed": "operation", "removals": "data"}
    rows = [
        (moment(float(event["time"])), kinds[event["kind"]], line)
        for event in events
        for line in _changed(event)
    ]
    return "<h2>Changes on record</h2>" + table(("when (UTC)", "kind", "change"), rows, 3)


def damage(lines: Sequence[str]) -> str:
    """Return the table of what could not be read."""
    if not lines:
        return ""
    different = list(dict.fromkeys(lines))  # an object may have been read for each of its fields
    first = [(line,) for line in different[:_DAMAGE_SHOWN]]
    count = f"{len(different):,} records or objects could not be read; the page is made without them."
    return f'<h2>Damaged records</h2><p class="soft">{count}</p>' + table(("what",), first, 1)


def moment(seconds: float) -> str:
    """Return a time since 1970 as date and time in UTC, to the second."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
