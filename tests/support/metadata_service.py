"""A cloud's metadata service, from which a machine learns its credentials: one that refuses for a while."""

import json
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest


class MetadataService:
    """Answers as Amazon's does, after it has refused `refusals` questions. A context manager."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        service = self

        class Handler(_Handler):
            metadata = service

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True

    def use(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Takes this process's credentials away, and points it here for others."""
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
            monkeypatch.delenv(name)
        endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/"
        monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", endpoint)

    def __enter__(self) -> "MetadataService":
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    metadata: MetadataService

    def _serve(self) -> None:
        if self.metadata.refusals:
            self.metadata.refusals -= 1
            self._send(503, b"busy")
        elif self.path.endswith("/token"):
            self._send(200, b"a-token")
        elif self.path.endswith("/security-credentials/"):
            self._send(200, b"a-role")
        else:
            expiration = (datetime.now(UTC) + timedelta(hours=6)).strftime("%Y-%m-%dT%H:%M:%SZ")
            keys = {"AccessKeyId": "role", "SecretAccessKey": "secret", "Token": "token"}
            answer = {"Code": "Success", "Type": "AWS-HMAC", "Expiration": expiration, **keys}
            self._send(200, json.dumps(answer).encode())

    do_GET = do_PUT = _serve

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Silence: the tests' output is pytest's."""
