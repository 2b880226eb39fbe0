"""Serves a site on a local port: GET and HEAD only, to those who name this machine as the host."""

import gzip
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from launcher.errors import OptionError
from launcher.observe.watch.site import Response, Site

_MOST_REQUESTS = 64  # at a time; more are turned away
_PATIENCE_S = 10.0  # with a browser that does not go on
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
    """Listens on `host` and `port` (0: any free port). Raises OptionError: it cannot.

    Attributes:
        site: what answers.
        names: hosts that a request may name. Others are refused: a foreign site can make its own name point at this
            machine (DNS rebinding), and its requests then name that site.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, site: Site, host: str, port: int) -> None:
        self.site, self._host = site, host
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
        """Whether a request's Host header means this machine: one of `names` or any address, with any port, for a
        tunnel may have another one."""
        try:
            name = urlsplit(f"//{host or ''}").hostname
        except ValueError:
            return False
        return name is not None and (name in self.names or _is_address(name))

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client: object) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client)
        else:
            self.shutdown_request(request)

    def process_request_thread(
        self, request: socket.socket | tuple[bytes, socket.socket], client: object
    ) -> None:
        try:
            super().process_request_thread(request, client)
        finally:
            self._room.release()

    def handle_error(self, request: object, client: object) -> None:
        """A browser that has gone, or does not go on, is nobody's fault."""


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
        """Nothing is logged."""

    def _answer(self) -> Response:
        if not self.server.is_named(self.headers.get("Host")):
            return _plain(HTTPStatus.FORBIDDEN, "this host is not served here; --host says which is")
        try:
            return self.server.site.answer(self.path)
        except Exception as error:  # of a request or records that nobody thought of: the next may go well
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
    """Until Ctrl-C or SIGTERM. `say` tells the operator where the page is."""
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
    """Whether it stands for all addresses of this machine."""
    return host in ("", "0.0.0.0", "::")


def _is_address(name: str) -> bool:
    with suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return False
