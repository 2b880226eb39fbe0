"""Those who are told of a run: a webhook's server that answers or hangs, and what trackers keep."""

import json
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
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
def serving_webhook(*codes: int, hangs: bool = False, location: str = "") -> Iterator[Server]:
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


Values = dict[str, dict[int, float]]
"""By name and step: the last value."""
_WANDB_BLOCK_BYTES = 32768
_WANDB_HEADER = struct.Struct("<IHB")  # checksum, bytes, and which part of an entry it is
_WANDB_WHOLE, _WANDB_LAST = 1, 4


def wandb_records(folder: Path) -> list[Any]:
    """The records of all offline runs in `folder`, in the order in which they were made."""
    from wandb.proto import wandb_internal_pb2

    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"), key=lambda path: path.stat().st_ctime_ns)
    return [wandb_internal_pb2.Record.FromString(data) for file in files for data in _wandb_entries(file.read_bytes())]


def _wandb_entries(content: bytes) -> Iterator[bytes]:
    """The entries of a file of W&B: LevelDB's log, whose first block begins with 7 bytes of W&B's own. The package had
    a reader of it until 0.29."""
    assert content[:4] == b":W&B"
    position, entry = 7, b""
    while position + _WANDB_HEADER.size <= len(content):
        if (left := -position % _WANDB_BLOCK_BYTES) and left < _WANDB_HEADER.size:
            position += left  # no header is cut in two by a block's end
            continue
        _, size, part = _WANDB_HEADER.unpack_from(content, position)
        position += _WANDB_HEADER.size
        entry += content[position : position + size]
        position += size
        if part in (_WANDB_WHOLE, _WANDB_LAST):
            yield entry
            entry = b""


def wandb_rows(folder: Path) -> list[dict[str, float]]:
    """The history, in order, W&B's own fields left out."""
    rows = []
    for record in wandb_records(folder):
        if record.WhichOneof("record_type") == "history":
            named = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            rows.append({name: value for name, value in named.items() if not name.startswith("_")})
    return rows


def wandb_values(folder: Path) -> Values:
    values: Values = {}
    for row in wandb_rows(folder):
        for name in row.keys() - {"step"}:
            values.setdefault(name, {})[int(row["step"])] = row[name]
    return values


def mlflow_runs(uri: str, experiment: str = "maskfleet") -> list[Any]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(uri)
    found = client.get_experiment_by_name(experiment)
    return list(client.search_runs([found.experiment_id])) if found else []


def mlflow_values(uri: str) -> Values:
    from mlflow.tracking import MlflowClient

    (run,) = mlflow_runs(uri)
    values: Values = {}
    for name in run.data.metrics:
        history = MlflowClient(uri).get_metric_history(run.info.run_id, name)
        values[name] = {entry.step: entry.value for entry in sorted(history, key=lambda entry: entry.timestamp)}
    return values
