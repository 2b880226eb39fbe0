"""The report's tables: events, interruptions and damage."""

from collections.abc import Sequence

from launcher.observe.inspect.report.events import PROBLEM_EVENT_KINDS, ROUTINE_EVENT_KINDS, describe_event, utc_text
from launcher.observe.inspect.report.figures import Interruption
from launcher.observe.inspect.report.style import html_table
from launcher.output import human_duration
from launcher.runtime.run.step_table import Record

_MAX_DAMAGE_ROWS = 12
_MAX_EVENT_ROWS = 200
_DEDUPLICATED_EVENT_KINDS = frozenset({"preflight", "unfit"})  # kinds whose equal events are shown once


def events_table(run_events: Sequence[Record]) -> str:
    """Return the table of the newest events, newest first. Equal events that every start reports are shown once."""
    shown: dict[tuple[str, object], Record] = {}
    for number, event in enumerate(run_events):
        if event["kind"] not in ROUTINE_EVENT_KINDS or event.get("problems"):
            words = describe_event(event)
            shown.setdefault((words, None if event["kind"] in _DEDUPLICATED_EVENT_KINDS else number), event)
    if not shown:
        return ""
    newest = list(shown.items())[: -_MAX_EVENT_ROWS - 1 : -1]
    rows = [(utc_text(float(event["time"])), str(event["attempt"] or "-"), words) for (words, _), event in newest]
    bad = [event["kind"] in PROBLEM_EVENT_KINDS for _, event in newest]
    note = f'<p class="soft">{len(shown):,} in all, the newest first.</p>'
    heads = ("when (UTC)", "attempt", "what")
    return f"<h2>Events</h2>{note}" + html_table(heads, rows, 3, bad_rows=bad, is_scrollable=True)


def interruptions_table(interruptions: Sequence[Interruption]) -> str:
    if not interruptions:
        return '<h2>Interruptions</h2><p class="soft">None.</p>'
    rows = [
        (
            utc_text(gap.time),
            str(gap.attempt),
            gap.cause,
            "not yet" if gap.resumed_from is None else f"{gap.resumed_from:,}",
            "-" if gap.lost is None else f"{gap.lost:,}",
            "-" if gap.downtime is None else human_duration(gap.downtime),
            ", ".join(f"{part} {seconds:.1f} s" for part, seconds in gap.recovery.items()) or "-",
        )
        for gap in interruptions
    ]
    heads = ("when (UTC)", "attempt", "cause", "resumed at step", "steps lost", "gap", "its last part")
    return "<h2>Interruptions</h2>" + html_table(heads, rows, 2)


def damage_table(lines: Sequence[str]) -> str:
    """Return the table of records and objects that could not be read."""
    if not lines:
        return ""
    different = list(dict.fromkeys(lines))  # a damaged object is reported once for each field that was read
    first = [(line,) for line in different[:_MAX_DAMAGE_ROWS]]
    count = f"{len(different):,} records or objects could not be read; the page is made without them."
    return f'<h2>Damaged records</h2><p class="soft">{count}</p>' + html_table(("what",), first, 1)
