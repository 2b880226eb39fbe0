"""A web server in this process that takes events, for tests of webhooks: it answers as it is told to, or hangs."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SECRET = "T00/s3cr3t"
"""In its URL."""
WAIT_S = 10.0
"""For what comes at once unless something is broken."""


@dataclass
class Server:
    """What it was sent, and what it answers: codes in turn, the last one for ever; it hangs until `free` is set.

    `location`: where it says that things are. `requests`: of any kind that came.
    """

    codes: list[int] = field(default_factory=lambda: [200])
    bodies: list[dict[str, Any]] = field(default_factory=list)
    free: threading.Event = field(default_factory=threading.Event)
    url: str = ""
    location: str = ""
    requests: int = 0
    came: threading.Condition = field(default_factory=threading.Condition)

    def take(self, handler: BaseHTTPRequestHandler) -> None:
        body = json.loads(handler.rfile.read(int(handler.headers["Content-Length"])))
        with self.came:
            self.bodies.append(body)
            self.came.notify_all()
            code = self.codes.pop(0) if len(self.codes) > 1 else self.codes[0]
        self.free.wait()
        handler.send_response(code)
        if self.location:
            handler.send_header("Location", self.location)
        handler.end_headers()

    def wait(self, count: int) -> list[str]:
        """The kinds of the first `count` events it was sent."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.bodies) >= count, WAIT_S), self.bodies
            return [body["kind"] for body in self.bodies]


@contextmanager
def serving(*codes: int, hangs: bool = False, location: str = "") -> Iterator[Server]:
    state = Server(list(codes) or [200], location=location)
    if not hangs:
        state.free.set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            state.requests += 1
            state.take(self)

        def do_GET(self) -> None:
            state.requests += 1
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{server.server_port}/{SECRET}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.free.set()
        server.shutdown()
        server.server_close()
