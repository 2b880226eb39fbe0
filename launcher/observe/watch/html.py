"""The HTML of pages and their parts. All text from a store goes through `text`.

A page is complete without its script, which only updates it.
"""

import json
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from launcher.observe.inspect.report.style import badge, header, text
from launcher.observe.inspect.report.summary import AXES, Axis
from launcher.observe.watch.reader import View

Sections = dict[str, str]

_STATES = {"finished": "", "running": " live", "failed": " bad", "dead": " bad", "unreadable": " bad"}


def ago(seconds: float) -> str:
    """Return a time since 1970 as HTML. The page's script shows how long ago it is."""
    when = datetime.fromtimestamp(seconds, UTC)
    return f'<time data-at="{seconds:.0f}">{when:%Y-%m-%d %H:%M:%S} UTC</time>'


def state_badge(state: str, reason: str | None = None) -> str:
    why = f'<span class="why">{text(reason)}</span>' if reason else ""
    return badge(state, _STATES.get(state, " open")) + why


def progress(step: int, total: int, ahead: str = "") -> str:
    """Return the number of steps done, of all steps, as a bar and in words."""
    share = f"{min(1.0, step / total):.1%}" if total else ""
    words = f"step {step:,} of {total:,} ({share})" + (f", {text(ahead)}" if ahead else "")
    bar = f'<progress max="{total}" value="{min(step, total)}" aria-label="steps done"></progress>'
    return f'<div class="progress">{bar}<span>{words}</span></div>'


def facts(rows: Iterable[tuple[str, str]]) -> str:
    """Return a list of names and values. The values are HTML already."""
    listed = "".join(f"<div><dt>{text(name)}</dt><dd>{value}</dd></div>" for name, value in rows)
    return f'<dl class="facts">{listed}</dl>'


def axes(chosen: Axis) -> str:
    """Return the links that choose the x axis of the curves."""
    links = "".join(
        f'<a href="?axis={axis}" data-axis="{axis}"{" aria-current=true" if axis == chosen else ""}>{axis}</a>'
        for axis in AXES
    )
    return f'<nav class="axes" aria-label="curves by"><span>curves by</span>{links}</nav>'


def guarded(what: str, make: Callable[[], Sections]) -> Sections:
    """Return what `make` returns. If it fails because records do not have the expected content, return a note about
    that instead, so that the rest of the page is shown."""
    try:
        return make()
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        note = f"The {what} cannot be shown: their records do not have the expected content"
        return {what: f'<p class="notice bad">{text(f"{note} ({type(error).__name__}: {error}).")}</p>'}


PAGE_ONLY = "reload to see what is new"
_RELOAD_S = 10  # seconds after which a browser without scripts reloads the page


def standing(view: View[Any]) -> dict[str, object]:
    """Return for the page's script the age of the page, the error of the last read, and how long reads have failed and
    the present read has taken, in seconds."""
    return {
        "age": round(view.age, 1) if view.value is not None else None,
        "error": view.error,
        "failing": round(view.failing, 1) if view.error is not None else None,
        "reading": round(view.reading, 1) if view.reading is not None else None,
    }


def version(sections: Sections) -> str:
    """Return a string that changes whenever the content does."""
    return sha256(json.dumps(sections).encode()).hexdigest()[:16]


def waiting(uri: str, view: View[Any]) -> Sections:
    """Return the sections of a page for a run or folder that has not been read yet."""
    problem = (
        f"{view.error[:1].upper()}{view.error[1:]}." if view.error else "It is being read for the first time."
    )
    return {
        "head": header(uri, badge("waiting", " open")),
        "notice": f'<p class="notice">{text(problem)} This page shows it as soon as it can be read.</p>',
    }


def document(title: str, sections: Sections, state: dict[str, object], up: str = "") -> str:
    """Return the page as HTML. `up`: a link to the page above it."""
    body = "".join(f'<section id="s-{name}">{content}</section>' for name, content in sections.items())
    known = text(json.dumps({"version": version(sections), **state}))
    reload = f'<noscript><meta http-equiv="refresh" content="{_RELOAD_S}"></noscript>'
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{text(title)} - Maskfleet</title>{reload}"
        '<link rel="icon" href="data:,"><link rel="stylesheet" href="/watch.css">'
        '<script src="/watch.js" defer></script>'
    )
    error = f" {text(state['error'])}" if state["error"] else ""
    live = (
        f'<p id="live" role="status"><span class="pulse"></span><span id="age">{PAGE_ONLY}.{error}</span></p>'
    )
    bar = f'<div class="bar">{up}{live}</div>'
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body data-known="{known}">'
        f'<main>{bar}<div id="sections">{body}</div></main></body></html>\n'
    )
