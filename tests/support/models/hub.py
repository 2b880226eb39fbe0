"""A Hugging Face Hub on this machine: folders served as repositories, each of one commit."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@contextmanager
def serving_hub(repositories: Mapping[str, Path]) -> Iterator[str]:
    """The endpoint. `main`, `v1` and the commit are revisions of every repository."""

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer()

        def do_GET(self) -> None:
            self._answer()

        def log_message(self, *_: object) -> None:
            pass

        def _answer(self) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts[:2] == ["api", "models"]:
                name, revision = "/".join(parts[2:4]), parts[5] if len(parts) > 5 else "main"
                if name not in repositories or revision not in ("main", "v1", COMMIT):
                    missing = "RepoNotFound" if name not in repositories else "RevisionNotFound"
                    return self._send(404, b"{}", {"X-Error-Code": missing})
                files = [path for path in repositories[name].rglob("*") if path.is_file()]
                siblings = [{"rfilename": str(path.relative_to(repositories[name]))} for path in files]
                about = {"id": name, "modelId": name, "sha": COMMIT, "siblings": siblings, "tags": []}
                return self._send(200, json.dumps(about).encode(), {})
            name, (_, commit, *rest) = "/".join(parts[:2]), parts[2:]
            path = repositories[name].joinpath(*rest)
            content = path.read_bytes()
            tag = hashlib.sha256(content).hexdigest()
            return self._send(200, content, {"ETag": f'"{tag}"', "X-Repo-Commit": commit})

        def _send(self, code: int, content: bytes, headers: Mapping[str, str]) -> None:
            self.send_response(code)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
