"""Pieces of pages. Whatever comes from a store goes through `text`."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from html import escape

from data_service.visible import visible
from launcher.inspect.report.summary import AXES, Axis

Sections = dict[str, str]

_STATES = {"finished": "", "running": " live", "failed": " bad", "dead": " bad", "unreadable": " bad"}


def text(value: object) -> str:
    """Escaped; controls and marks of direction, which could disguise it, are made visible."""
    return escape(visible(str(value)))


def ago(seconds: float) -> str:
    """A time since 1970; the page's script says how long ago that is."""
    when = datetime.fromtimestamp(seconds, UTC)
    return f'<time data-at="{seconds:.0f}">{when:%Y-%m-%d %H:%M:%S} UTC</time>'


def state_badge(state: str, reason: str | None = None) -> str:
    why = f'<span class="why">{text(reason)}</span>' if reason else ""
    return f'<span class="state{_STATES.get(state, " open")}">{text(state)}</span>{why}'


def progress(step: int, total: int, ahead: str = "") -> str:
    """Steps done, of all, as a bar and in words."""
    share = f"{min(1.0, step / total):.1%}" if total else ""
    words = f"step {step:,} of {total:,} ({share})" + (f", {text(ahead)}" if ahead else "")
    bar = f'<progress max="{total}" value="{min(step, total)}" aria-label="steps done"></progress>'
    return f'<div class="progress">{bar}<span>{words}</span></div>'


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Names, and values that are HTML already."""
    listed = "".join(f"<div><dt>{text(name)}</dt><dd>{value}</dd></div>" for name, value in rows)
    return f'<dl class="facts">{listed}</dl>'


def axes(chosen: Axis) -> str:
    """What the curves lie over, to choose."""
    links = "".join(
        f'<a href="?axis={axis}" data-axis="{axis}"{" aria-current=true" if axis == chosen else ""}>{axis}</a>'
        for axis in AXES
    )
    return f'<nav class="axes" aria-label="curves by"><span>curves by</span>{links}</nav>'


def guarded(what: str, make: Callable[[], Sections]) -> Sections:
    """What `make` makes; or, of records that do not hold what they should, a note that says so: the rest of the page
    is shown all the same."""
    try:
        return make()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        note = f"The {what} cannot be shown: what is stored for them is not as it should be"
        return {what: f'<p class="notice bad">{text(f"{note} ({type(error).__name__}: {error}).")}</p>'}
