"""What the server answers: pages about a run or a folder of runs, and what has changed in them."""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from data_service.store.base import Store
from launcher.observe.inspect.report.style import CSS
from launcher.observe.inspect.report.summary import AXES, Axis
from launcher.observe.watch import pages
from launcher.observe.watch.html import Sections, document, standing, version, waiting
from launcher.observe.watch.reader import FolderReader, RunReader, SeenFolder, SeenRun
from launcher.observe.watch.watched import View, Watched
from launcher.runtime.run.outline import RECORD

_KEPT = 32  # drawn pages
_UP = '<a class="up" href="/">&larr; all runs</a>'


@dataclass(frozen=True)
class Response:
    """`body` in UTF-8."""

    status: int
    kind: str
    body: bytes


@dataclass(frozen=True)
class _Page:
    """A drawn page."""

    title: str
    sections: Sections
    state: dict[str, object]
    up: str = ""


class Site:
    """Reads the run or folder at `uri` while somebody looks, and shows it. Any number of threads may ask."""

    def __init__(self, uri: str, store: Store) -> None:
        self._uri, self._store = uri, store
        self._runs: dict[str, Watched[SeenRun]] = {}
        self._readers = RunReader(uri, store), FolderReader(uri, store)
        self._top: Watched[SeenRun | SeenFolder] = Watched(self._read)
        self._lock = threading.Lock()
        self._drawing = threading.Lock()  # what many ask for at the same time is drawn once
        self._drawn: dict[tuple[object, ...], Sections] = {}
        style = f"{CSS}{_asset('watch.css')}".encode()
        script = _asset("watch.js").encode()
        self._files = {
            "/watch.css": Response(200, "text/css", style),
            "/watch.js": Response(200, "text/javascript", script),
        }

    def answer(self, target: str) -> Response:
        """To a GET of `target`, a path with a query."""
        parts = urlsplit(target)
        if parts.path in self._files:
            return self._files[parts.path]
        query = parse_qs(parts.query, keep_blank_values=True, max_num_fields=100)
        page = self._page(parts.path, _axis(query), query.get("run", []))
        if page is None:
            return Response(404, "text/plain", b"there is no such page\n")
        if "live" in query:
            return _news(page, query["live"][0])
        html = document(page.title, page.sections, page.state, page.up)
        return Response(200, "text/html", html.encode("utf-8", "replace"))

    def _page(self, path: str, axis: Axis, asked: Sequence[str]) -> _Page | None:
        """None if there is none at `path`."""
        top = self._top.look()
        folder = top.value if isinstance(top.value, SeenFolder) else None
        if path.startswith("/run/") and folder is not None:
            name = unquote(path.removeprefix("/run/"))
            if name not in folder.runs:
                return None
            view = self._watched(name).look()
            return self._run(f"{self._uri.rstrip('/')}/{name}", name, view, view.value, axis, _UP)
        if path != "/":
            return None
        if folder is not None:
            return self._folder(top, folder, axis, asked)
        seen = top.value if isinstance(top.value, SeenRun) else None
        return self._run(self._uri, "", top, seen, axis)

    def _run(
        self, uri: str, name: str, view: View[Any], seen: SeenRun | None, axis: Axis, up: str = ""
    ) -> _Page:
        if seen is None:
            return _Page(uri, waiting(uri, view), standing(view), up)
        key = ("run", name, axis, view.version)
        with self._drawing:
            sections = self._drawn.get(key) or self._keep(key, pages.run_sections(seen, axis))
        return _Page(seen.status.name, sections, standing(view), up)

    def _folder(self, top: View[Any], folder: SeenFolder, axis: Axis, asked: Sequence[str]) -> _Page:
        tones = pages.chosen(folder, asked)
        for name in tones:  # all are woken up before one is waited for
            self._watched(name).look(patience_s=0.0)
        views = {name: self._watched(name).look() for name in tones}
        versions = tuple((name, tone, views[name].version, views[name].error) for name, tone in tones.items())
        key = ("folder", axis, top.version, versions)
        with self._drawing:
            sections = self._drawn.get(key) or self._keep(
                key, pages.folder_sections(self._uri, folder, tones, views, axis)
            )
        return _Page(self._uri.rstrip("/").rpartition("/")[2], sections, standing(top))

    def _keep(self, key: tuple[object, ...], sections: Sections) -> Sections:
        while len(self._drawn) >= _KEPT:
            del self._drawn[next(iter(self._drawn))]  # the oldest
        self._drawn[key] = sections
        return sections

    def _read(self) -> SeenRun | SeenFolder:
        one, many = self._readers
        return one.read() if self._store.size(RECORD) is not None else many.read()

    def _watched(self, name: str) -> Watched[SeenRun]:
        """Of one of the folder's runs."""
        with self._lock:
            if name not in self._runs:
                reader = RunReader(f"{self._uri.rstrip('/')}/{name}", self._store.at(name))
                self._runs[name] = Watched(reader.read)
            return self._runs[name]


def _news(page: _Page, known: str) -> Response:
    """What is new since the version `known`: all sections, or none."""
    current = version(page.sections)
    news: dict[str, object] = {"version": current, "title": page.title, **page.state}
    if current != known:
        news["sections"] = page.sections
    return Response(200, "application/json", json.dumps(news).encode())


def _axis(query: dict[str, list[str]]) -> Axis:
    asked = query.get("axis", [""])[0]
    return next((axis for axis in AXES if axis == asked), "steps")


def _asset(name: str) -> str:
    return resources.files("launcher.observe.watch").joinpath("assets", name).read_text("utf-8")
