"""A whole page: its sections, and how old they are. The page is complete without its script, which only updates it."""

import json
from hashlib import sha256
from typing import Any

from launcher.watch.html import Sections, text
from launcher.watch.watched import View

PAGE_ONLY = "reload to see what is new"
_RELOAD_S = 10  # a browser that runs no script


def standing(view: View[Any]) -> dict[str, object]:
    """How old a page is, and what is in its way: for its script. Seconds."""
    return {
        "age": round(view.age, 1) if view.value is not None else None,
        "error": view.error,
        "failing": round(view.failing, 1) if view.error is not None else None,
        "reading": round(view.reading, 1) if view.reading is not None else None,
    }


def version(sections: Sections) -> str:
    """A string that changes whenever the content does."""
    return sha256(json.dumps(sections).encode()).hexdigest()[:16]


def waiting(uri: str, view: View[Any]) -> Sections:
    """The sections of a page about which nothing is known yet."""
    problem = (
        f"{view.error[:1].upper()}{view.error[1:]}." if view.error else "It is being read for the first time."
    )
    return {
        "head": f'<header><h1>{text(uri)}</h1><span class="state open">waiting</span></header>',
        "notice": f'<p class="notice">{text(problem)} This page shows it as soon as it can be read.</p>',
    }


def document(title: str, sections: Sections, state: dict[str, object], up: str = "") -> str:
    """The page as HTML. `up`: to the page above it, a link."""
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
