"""Where the wall time went: one bar of attempts and gaps, with a tick for every checkpoint."""

from html import escape

from launcher.format import human_duration
from launcher.run.history import History
from launcher.run.step_table import Record

_WIDTH, _BAR = 1060, 26
_BEGINS = ("start", "resume")


def draw_timeline(history: History) -> str:
    """An SVG figure; empty text without two events to span a time."""
    events = [event for event in history.events if event["attempt"] > 0]
    if len(events) < 2 or events[-1]["time"] <= events[0]["time"]:
        return ""
    first, span = float(events[0]["time"]), float(events[-1]["time"]) - float(events[0]["time"])
    shapes = [f'<rect class="idle" x="0" y="4" width="{_WIDTH}" height="{_BAR}" rx="4"/>']
    for begin, end in _spans(events):
        x, width = _WIDTH * (begin["time"] - first) / span, _WIDTH * (end["time"] - begin["time"]) / span
        length = human_duration(end["time"] - begin["time"])
        title = (
            f"<title>attempt {begin['attempt']}: {escape(length)} from step {begin.get('step', 0):,}</title>"
        )
        box = f'x="{x:.1f}" y="4" width="{max(width, 1.5):.1f}" height="{_BAR}" rx="4"'
        shapes.append(f'<rect class="time" {box}>{title}</rect>')
    for event in events:
        if event["kind"] == "commit":
            x = _WIDTH * (event["time"] - first) / span
            title = f"<title>checkpoint at step {event['step']:,}</title>"
            shapes.append(
                f'<line class="commit" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{_BAR + 8}">{title}</line>'
            )
    shapes.append(f'<text class="tick" x="0" y="{_BAR + 24}">0</text>')
    label = human_duration(span)
    shapes.append(f'<text class="tick" x="{_WIDTH}" y="{_BAR + 24}" text-anchor="end">{label}</text>')
    box = f"0 0 {_WIDTH} {_BAR + 30}"
    svg = f'<svg viewBox="{box}" role="img" aria-label="attempts over time">{"".join(shapes)}</svg>'
    caption = "<b>Attempts</b> <small>training, gaps between attempts, and checkpoints (green)</small>"
    return f'<figure class="wide"><figcaption>{caption}</figcaption>{svg}</figure>'


def _spans(events: list[Record]) -> list[tuple[Record, Record]]:
    """First and last event of each attempt."""
    begins = [index for index, event in enumerate(events) if event["kind"] in _BEGINS]
    ends = [*(index - 1 for index in begins[1:]), len(events) - 1]
    return [(events[begin], events[end]) for begin, end in zip(begins, ends, strict=True)]
