"""An HTTP proxy before an S3 server that, when told to, answers as a failing network or server would."""

import http.client
import io
import os
import socket
import ssl
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Literal
from urllib.parse import urlsplit

from tests.support.stores.http_server import LocalHandler, LocalServer

Fault = Literal[
    "error 500", "slow down", "skewed clock", "expired token", "unknown key", "denied", "no such key",
    "reset", "reset after", "truncate", "garble", "stall", "bad record",
]  # fmt: skip

_PIECE = 256 << 10  # bytes taken from a client at a time

Errors = Mapping[Fault, tuple[int, str]]
"""Status and code with which a service answers."""

S3_ERRORS: Errors = {
    "error 500": (500, "InternalError"),
    "slow down": (503, "SlowDown"),
    "skewed clock": (403, "RequestTimeTooSkewed"),
    "expired token": (400, "ExpiredToken"),
    "unknown key": (403, "InvalidAccessKeyId"),
    "denied": (403, "AccessDenied"),
    "no such key": (404, "NoSuchKey"),
}


class FaultProxy(LocalServer):
    """Forwards every request to `upstream`, but treats the next ones as the faults in `plan` say, in turn.

    "reset" breaks the connection before the request reaches the server, "reset after" once the server has
    carried it out; "truncate" ends the body half-way; "garble" flips a bit in the middle of the body; "stall"
    never answers; "bad record" sends what is no TLS in the middle of the body.
    `bytes_per_second` is the speed of the line to the server, shared by all that is sent there; None for no limit.
    `only` limits faults to matching requests: it is given the method and the path. `always` is the fault once
    the plan is used up. `requests` records what came, as (method, path, access key or token), `carried_out` what the
    server did, as (method, path, its status), whatever the client heard of it. `mangle`, if set, is given the
    method and the whole answer as bytes, and returns what to send of it before the connection ends, or None for all.
    `tls` makes it speak TLS. `errors` are those of the service behind it.
    """

    def __init__(self, upstream: str, tls: ssl.SSLContext | None = None, errors: Errors = S3_ERRORS) -> None:
        self.errors = errors
        self.plan: deque[Fault] = deque()
        self.only: Callable[[str, str], bool] = lambda method, path: True
        self.always: Fault | None = None
        self.mangle: Callable[[str, bytes], bytes | None] | None = None
        self.bytes_per_second: float | None = None
        self._line_free = 0.0
        self.requests: list[tuple[str, str, str]] = []
        self.carried_out: list[tuple[str, str, int]] = []
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self.upstream = urlsplit(upstream).netloc
        super().__init__(_Handler)
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
            self.endpoint = self.endpoint.replace("http", "https")

    def next(self, method: str, path: str, authorization: str) -> Fault | None:
        with self._lock:
            signed = authorization.partition("Credential=")[2].partition("/")[0]
            key = signed or authorization.partition(" ")[2]
            self.requests.append((method, path, key))
            if not self.only(method, path):
                return None
            return self.plan.popleft() if self.plan else self.always

    def carry(self, size: int) -> None:
        """Returns when `size` bytes have gone over the line."""
        if self.bytes_per_second is None:
            return
        with self._lock:
            now = time.monotonic()
            self._line_free = max(now, self._line_free) + size / self.bytes_per_second
            over = self._line_free - now
        time.sleep(over)

    def __exit__(self, *error: object) -> None:
        self.closing.set()
        super().__exit__(*error)


class _Handler(LocalHandler):
    server_state: FaultProxy

    def _serve(self) -> None:
        body = self._receive(int(self.headers.get("Content-Length", 0)))
        fault = self.server_state.next(self.command, self.path, self.headers.get("Authorization", ""))
        if fault == "stall":
            self.server_state.closing.wait()
        if fault in ("reset", "stall"):
            self._break()
        elif fault is not None and fault in self.server_state.errors:
            self._refuse(*self.server_state.errors[fault])
        else:
            self._forward(body, fault)

    def _receive(self, size: int) -> bytes:
        body = bytearray()
        while len(body) < size:
            piece = self.rfile.read(min(_PIECE, size - len(body)))
            if not piece:
                break
            self.server_state.carry(len(piece))
            body += piece
        return bytes(body)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve

    def _forward(self, body: bytes, fault: Fault | None) -> None:
        connection = http.client.HTTPConnection(self.server_state.upstream, timeout=60)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():  # Host too: the signature covers it
            if name.lower() not in ("expect", "connection"):
                connection.putheader(name, value)
        connection.endheaders(body)
        answer = connection.getresponse()
        content = answer.read()
        self.server_state.carried_out.append((self.command, self.path, answer.status))
        connection.close()
        if fault == "reset after":
            self._break()
        elif self.server_state.mangle is None:
            self._answer(answer, content, fault)
        else:
            self._answer_mangled(answer, content, self.server_state.mangle)

    def _answer_mangled(
        self,
        answer: http.client.HTTPResponse,
        content: bytes,
        mangle: Callable[[str, bytes], bytes | None],
    ) -> None:
        line, self.wfile = self.wfile, io.BytesIO()
        self._answer(answer, content if self.command != "HEAD" else b"", None)
        whole, self.wfile = self.wfile.getvalue(), line
        instead = mangle(self.command, whole)
        self.wfile.write(whole if instead is None else instead)
        self.close_connection = self.close_connection or instead is not None

    def _answer(self, answer: http.client.HTTPResponse, content: bytes, fault: Fault | None) -> None:
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length", "date", "server"):
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else None
        self.send_header("Content-Length", length or str(len(content)))
        self.end_headers()
        middle = len(content) // 2
        if fault == "bad record":
            self.wfile.write(content[:middle])
            os.write(self.connection.fileno(), bytes(64))
            self.close_connection = True
            return
        if fault == "truncate":
            self.wfile.write(content[:middle])
            self._break()
            return
        if fault == "garble" and content:
            content = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
        self.wfile.write(content)

    def _refuse(self, status: int, code: str) -> None:
        content = f"<Error><Code>{code}</Code><Message>injected</Message></Error>".encode()
        self.send_answer(status, content)

    def _break(self) -> None:
        """Ends the connection with a reset, not a polite end of file."""
        self.wfile.flush()
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()
