"""The server of live pages about a run or a folder of runs, and of what has changed in them. It answers only GET and
HEAD, on a local port, and only requests that name this machine as the host."""

import gzip
import ipaddress
import json
import re
import signal
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from data_service.store.base import Store
from launcher.errors import OptionError
from launcher.observe.inspect.report.style import CSS
from launcher.observe.inspect.report.summary import AXES, Axis
from launcher.observe.watch import pages
from launcher.observe.watch.html import Sections, document, standing, version, waiting
from launcher.observe.watch.reader import FolderReader, RunReader, SeenFolder, SeenRun, View, Watched
from launcher.runtime.run.outline import RECORD

_KEPT = 32  # largest number of drawn pages in memory
_UP = '<a class="up" href="/">&larr; all runs</a>'


@dataclass(frozen=True)
class Response:
    """A response to a request. `body` is in UTF-8."""

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
    """Reads the run or folder at `uri` while somebody looks at its pages, and draws them. It is thread-safe."""

    def __init__(self, uri: str, store: Store) -> None:
        self._uri, self._store = uri, store
        self._runs: dict[str, Watched[SeenRun]] = {}
        self._readers = RunReader(uri, store), FolderReader(uri, store)
        self._top: Watched[SeenRun | SeenFolder] = Watched(self._read)
        self._lock = threading.Lock()
        self._drawing = threading.Lock()  # a page for several requests at a time is drawn once
        self._drawn: dict[tuple[object, ...], Sections] = {}
        style = f"{CSS}{_asset('watch.css')}".encode()
        script = _asset("watch.js").encode()
        self._files = {
            "/watch.css": Response(200, "text/css", style),
            "/watch.js": Response(200, "text/javascript", script),
        }

    def answer(self, target: str) -> Response:
        """Return the response to a GET of `target`, a path with a query."""
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
        """Return the page at `path`; None if there is none."""
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
        for name in tones:  # start all reads before waiting for one
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
        """Return the reader of one of the folder's runs."""
        with self._lock:
            if name not in self._runs:
                reader = RunReader(f"{self._uri.rstrip('/')}/{name}", self._store.at(name))
                self._runs[name] = Watched(reader.read)
            return self._runs[name]


def _news(page: _Page, known: str) -> Response:
    """Return the state of a page, with all its sections if they have changed since the version `known`."""
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


_MOST_REQUESTS = 256  # at a time; further ones wait
_TURN_S = 0.02  # for a request to end, before an unfinished one makes room
_HOST = re.compile(
    r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:@/?#\\\[\]]+))(?::[0-9]{1,5})?"
)  # of a Host header, with its port
_PATIENCE_S = 10.0  # longest wait for a browser that does not finish its request
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Server(ThreadingHTTPServer):
    """Listens on `host` and `port` (0: any free port). Raises OptionError if it cannot.

    Attributes:
        site: the site that answers requests.
        names: hosts that a request may name. Others are refused: a foreign site can make its own name point at this
            machine (DNS rebinding), and requests then name that site.
    """

    daemon_threads = True
    request_queue_size = 512

    def __init__(self, site: Site, host: str, port: int) -> None:
        self.site, self._host = site, host
        self._unread: OrderedDict[socket.socket, None] = OrderedDict()  # connections, the oldest first
        self._room = threading.BoundedSemaphore(_MOST_REQUESTS)
        self.names = {"localhost", host.lower(), *({socket.gethostname().lower()} if _is_any(host) else ())}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Handler)
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise OptionError(
                f"cannot listen on {host}, port {port}: {reason}",
                remedy="--port 0 takes a free port; --host takes an address of this machine",
            ) from error

    @property
    def url(self) -> str:
        host = "localhost" if _is_any(self._host) else self._host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/"

    def is_named(self, host: str | None) -> bool:
        """Return whether a request's Host header means this machine: one of `names`, or any IP address. Any port is
        allowed, because a tunnel may use another one."""
        found = _HOST.fullmatch(host or "")
        name = (found[1] or found[2]).lower() if found else ""
        return name in self.names or _is_address(name)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client: object) -> None:
        """Answer on a thread. If all are busy, further clients wait, and the one that has been slowest to send its
        request makes room."""
        assert isinstance(request, socket.socket)
        while not self._room.acquire(timeout=_TURN_S):
            with suppress(KeyError, OSError):
                self._unread.popitem(last=False)[0].shutdown(socket.SHUT_RDWR)
        self._unread[request] = None
        super().process_request(request, client)

    def was_read(self, request: socket.socket) -> None:
        """Note that a client has sent its request."""
        self._unread.pop(request, None)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client: object
    ) -> None:
        try:
            super().process_request_thread(request, client)
        finally:
            assert isinstance(request, socket.socket)
            self.was_read(request)
            self._room.release()

    def handle_error(self, request: object, client: object) -> None:
        """Ignore errors of connections that a browser has closed or does not continue."""


class _Handler(BaseHTTPRequestHandler):
    """One request; the connection ends with it."""

    server: Server
    server_version, sys_version = "maskfleet", ""
    timeout = _PATIENCE_S

    def do_GET(self) -> None:
        self._send(self._answer())

    def do_HEAD(self) -> None:
        self._send(self._answer())

    def _refuse(self) -> None:
        self._send(_plain(HTTPStatus.METHOD_NOT_ALLOWED, "this page can only be read"))

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _answer(self) -> Response:
        self.server.was_read(self.connection)
        named = self.headers.get_all("Host", [])
        if len(named) != 1 or not self.server.is_named(named[0]) or not self.path.startswith("/"):
            return _plain(HTTPStatus.FORBIDDEN, "this host is not served here: choose it with --host")
        try:
            return self.server.site.answer(self.path)
        except Exception as error:  # an unexpected request or record: the next request may succeed
            return _plain(
                HTTPStatus.INTERNAL_SERVER_ERROR, f"no page could be made: {type(error).__name__}: {error}"
            )

    def end_headers(self) -> None:
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def _send(self, answer: Response) -> None:
        body = answer.body
        zipped = "gzip" in self.headers.get("Accept-Encoding", "") and len(body) > 1000
        if zipped:
            body = gzip.compress(body, 4)
        self.send_response(answer.status)
        self.send_header("Content-Type", f"{answer.kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Vary", "Accept-Encoding")
        if zipped:
            self.send_header("Content-Encoding", "gzip")
        if answer.status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def serve(server: Server, say: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM. `say`: function that tells the operator the page's URL."""
    asked = threading.Event()
    before = {
        number: signal.signal(number, lambda *_: asked.set()) for number in (signal.SIGINT, signal.SIGTERM)
    }
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), name="watch server", daemon=True)
    thread.start()
    say(server.url)
    asked.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    server.shutdown()
    server.socket.close()


def _plain(status: HTTPStatus, text: str) -> Response:
    return Response(status, "text/plain", f"{text}\n".encode("utf-8", "replace"))


def _is_any(host: str) -> bool:
    """Return whether `host` stands for all addresses of this machine."""
    return host in ("", "0.0.0.0", "::")


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False
