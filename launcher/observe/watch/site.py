"""The server of a run's live page. It answers only GET and HEAD, on a local port, and only requests that name this
machine as the host."""

import gzip
import ipaddress
import json
import re
import signal
import socket
import threading
from base64 import b64encode
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources

from data_service.store.base import Store
from launcher.errors import OptionError
from launcher.observe.inspect.report.style import CSS, escape_text, html_page, page_header, state_badge
from launcher.observe.watch.live import LivePage, draw_run_page

_RELOAD_INTERVAL_S = 10  # seconds after which a browser without scripts reloads the page
_HEAD_HTML = (  # in the live page's head: a script that updates the page, or a reload without scripts
    f'<noscript><meta http-equiv="refresh" content="{_RELOAD_INTERVAL_S}"></noscript>'
    '<link rel="icon" href="data:,"><script src="/live.js" defer></script>'
)


@dataclass(frozen=True)
class Response:
    """A response to a request. `body` is in UTF-8."""

    status: int
    content_type: str
    body: bytes
    headers: dict[str, str] = field(default_factory=dict)


class Site:
    """The live page of the run at `uri` and its script. It is thread-safe."""

    def __init__(self, uri: str, store: Store) -> None:
        self._uri = uri
        self._page = LivePage(lambda: draw_run_page(uri, store, _HEAD_HTML))
        script = resources.files("launcher.observe.watch").joinpath("assets", "live.js").read_bytes()
        self._script = Response(200, "text/javascript", script)

    def respond(self, path: str) -> Response:
        """Return the response to a GET of `path`."""
        if path == "/live.js":
            return self._script
        if path != "/":
            return _plain_response(HTTPStatus.NOT_FOUND, "there is no such page")
        html, state = self._page.get_page()
        html = html or self._waiting_page(state["error"])
        about = {"Maskfleet-State": json.dumps(state)}  # ASCII, as a header must be
        return Response(200, "text/html", html.encode("utf-8", "replace"), about)

    def _waiting_page(self, error: object) -> str:
        """Return the page for a run that has not been read yet."""
        problem = f"{error}." if error else "It is being read for the first time."
        note = f'<p class="notice">{escape_text(problem)} This page shows the run as soon as it can be read.</p>'
        section = f'<section id="s-head">{page_header(self._uri, state_badge("waiting", " open"))}{note}</section>'
        return html_page(f"{self._uri} - Maskfleet", [section], _HEAD_HTML)


_MAX_REQUESTS = 256  # slots: requests served at a time; further ones queue
_SLOT_TIMEOUT_S = 0.02  # seconds to wait for a free slot before the slowest request is dropped
_SEND_TIMEOUT_S = 10.0  # longest wait for a browser that does not finish its request
# The value of a Host header, with its port.
_HOST_PATTERN = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:@/?#\\\[\]]+))(?::[0-9]{1,5})?")
_BUSY_RESPONSE = b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n"
_STYLE_HASH = b64encode(sha256(CSS.encode()).digest()).decode()  # allows the page's own style sheet
_SECURITY_HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; script-src 'self'; style-src 'sha256-{_STYLE_HASH}'; connect-src 'self'; "
        "img-src data:; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class PageServer(ThreadingHTTPServer):
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
        self._unfinished: OrderedDict[socket.socket, None] = OrderedDict()  # requests, the oldest first
        self._slots = threading.BoundedSemaphore(_MAX_REQUESTS)
        self.names = {
            "localhost",
            host.lower(),
            *({socket.gethostname().lower()} if _is_wildcard_address(host) else ()),
        }
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
        host = "localhost" if _is_wildcard_address(self._host) else self._host
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_address[1]}/"

    def is_allowed_host(self, host: str | None) -> bool:
        """Return whether a request's Host header means this machine: one of `names`, or any IP address. Any port is
        allowed, because a tunnel may use another one."""
        found = _HOST_PATTERN.fullmatch(host or "")
        name = (found[1] or found[2]).lower() if found else ""
        return name in self.names or _is_ip_address(name)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client: object) -> None:
        """Answer on a thread. While all slots are taken, further clients queue, and the client that has taken longest
        to send its request is answered 503."""
        assert isinstance(request, socket.socket)
        while not self._slots.acquire(timeout=_SLOT_TIMEOUT_S):
            with suppress(KeyError, OSError):
                slowest = self._unfinished.popitem(last=False)[0]
                slowest.sendall(_BUSY_RESPONSE)
                slowest.shutdown(socket.SHUT_RDWR)
        self._unfinished[request] = None
        super().process_request(request, client)

    def mark_request_read(self, request: socket.socket) -> bool:
        """Record that a client's request was read. Return False if the client was dropped meanwhile."""
        try:
            del self._unfinished[request]
        except KeyError:
            return False
        return True

    def process_request_thread(self, request: socket.socket | tuple[bytes, socket.socket], client: object) -> None:
        try:
            super().process_request_thread(request, client)
        finally:
            assert isinstance(request, socket.socket)
            self._unfinished.pop(request, None)
            self._slots.release()

    def handle_error(self, request: object, client: object) -> None:
        """Ignore errors of connections that a browser has closed or has stopped using."""


class _Handler(BaseHTTPRequestHandler):
    """Answers one request and closes its connection."""

    server: PageServer
    server_version, sys_version = "maskfleet", ""
    timeout = _SEND_TIMEOUT_S

    def do_GET(self) -> None:
        if self.server.mark_request_read(self.connection):
            self._send_response(self._make_response())

    do_HEAD = do_GET

    def _refuse_method(self) -> None:
        self._send_response(
            _plain_response(HTTPStatus.METHOD_NOT_ALLOWED, "this page can only be read", Allow="GET, HEAD")
        )

    do_POST = do_PUT = do_PATCH = do_DELETE = do_OPTIONS = do_TRACE = do_CONNECT = _refuse_method

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""

    def _make_response(self) -> Response:
        named = self.headers.get_all("Host", [])
        if len(named) != 1 or not self.server.is_allowed_host(named[0]) or not self.path.startswith("/"):
            return _plain_response(HTTPStatus.FORBIDDEN, "requests for this host are refused: allow it with --host")
        try:
            return self.server.site.respond(self.path.partition("?")[0])
        except Exception as error:  # unexpected: the next request may succeed
            problem = f"no page could be made: {type(error).__name__}: {error}"
            return _plain_response(HTTPStatus.INTERNAL_SERVER_ERROR, problem)

    def end_headers(self) -> None:
        for name, value in _SECURITY_HEADERS.items():
            self.send_header(name, value)
        super().end_headers()

    def _send_response(self, response: Response) -> None:
        body = response.body
        zipped = "gzip" in self.headers.get("Accept-Encoding", "") and len(body) > 1000
        if zipped:
            body = gzip.compress(body, 4)
        self.send_response(response.status)
        self.send_header("Content-Type", f"{response.content_type}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Vary", "Accept-Encoding")
        if zipped:
            self.send_header("Content-Encoding", "gzip")
        for name, value in response.headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def serve(server: PageServer, show_url: Callable[[str], None]) -> None:
    """Serve until Ctrl-C or SIGTERM. `show_url`: function that shows the page's URL to the operator."""
    ended = threading.Event()
    before = {number: signal.signal(number, lambda *_: ended.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    threading.Thread(target=server.serve_forever, args=(0.1,), name="watch server", daemon=True).start()
    show_url(server.url)
    ended.wait()
    for number, handler in before.items():
        signal.signal(number, handler)
    server.shutdown()
    server.socket.close()


def _plain_response(status: HTTPStatus, words: str, **headers: str) -> Response:
    return Response(status, "text/plain", f"{words}\n".encode("utf-8", "replace"), headers)


def _is_wildcard_address(host: str) -> bool:
    """Return whether `host` stands for all addresses of this machine."""
    return host in ("", "0.0.0.0", "::")


def _is_ip_address(name: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False
