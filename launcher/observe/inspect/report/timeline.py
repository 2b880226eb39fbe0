"""Where the wall time went: one bar of attempts and gaps, with a tick for every checkpoint."""

from collections.abc import Sequence
from html import escape

from launcher.format import human_duration
from launcher.runtime.run.step_table import Record

_WIDTH, _BAR = 1060, 26
_MOST_COMMITS = 1000  # drawn, the newest
_BEGINS = ("start", "resume")


def draw_timeline(told: Sequence[Record]) -> str:
    """An SVG figure of a run's events; empty text without two of them to span a time."""
    events = [event for event in told if event["attempt"] > 0]
    if len(events) < 2 or events[-1]["time"] <= events[0]["time"]:
        return ""
    first, span = float(events[0]["time"]), float(events[-1]["time"]) - float(events[0]["time"])
    shapes = [f'<rect class="idle" x="0" y="4" width="{_WIDTH}" height="{_BAR}"/>']
    for begin, end in _spans(events):
        x, width = _WIDTH * (begin["time"] - first) / span, _WIDTH * (end["time"] - begin["time"]) / span
        length = human_duration(end["time"] - begin["time"])
        title = (
            f"<title>attempt {begin['attempt']}: {escape(length)} from step {begin.get('step', 0):,}</title>"
        )
        box = f'x="{x:.1f}" y="4" width="{max(width, 1.5):.1f}" height="{_BAR}"'
        shapes.append(f'<rect class="time" {box}>{title}</rect>')
    for event in [event for event in events if event["kind"] == "commit"][-_MOST_COMMITS:]:
        x = _WIDTH * (event["time"] - first) / span
        title = f"<title>checkpoint at step {event['step']:,}</title>"
        shapes.append(f'<line class="commit" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_BAR + 8}">{title}</line>')
    box = f'viewBox="0 0 {_WIDTH} {_BAR + 8}" preserveAspectRatio="none"'
    svg = f'<svg class="timeline" {box} role="img" aria-label="attempts over time">{"".join(shapes)}</svg>'
    ends = f'<div class="ends"><span>0</span><span>{human_duration(span)}</span></div>'
    caption = "<b>Attempts</b> <small>training, gaps between attempts, and checkpoints (green)</small>"
    return f'<figure class="wide"><figcaption>{caption}</figcaption>{svg}{ends}</figure>'


def _spans(events: list[Record]) -> list[tuple[Record, Record]]:
    """First and last event of each attempt."""
    begins = [index for index, event in enumerate(events) if event["kind"] in _BEGINS]
    ends = [*(index - 1 for index in begins[1:]), len(events) - 1]
    return [(events[begin], events[end]) for begin, end in zip(begins, ends, strict=True)]
