"""An S3 address to measure with: the one that was named, or a moto server in a process of its own."""

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from unittest import mock

from program import BenchError

_BUCKET = "bench"
_ADDRESS = re.compile(r"Running on (http://127\.0\.0\.1:\d+)")


@dataclass(frozen=True)
class Place:
    """Where to write. `server` is the process that serves it, None if it runs elsewhere."""

    uri: str
    server: int | None


@contextmanager
def place(uri: str | None) -> Iterator[Place]:
    """`uri` itself, or an empty bucket of a server that stops when the context ends.

    Raises:
        BenchError: no address was given and moto is not installed.
    """
    if uri is not None:
        yield Place(uri, None)
        return
    if find_spec("moto") is None or find_spec("flask") is None:
        raise BenchError(
            "no S3 address was given, and moto, whose server would take its place, is not installed",
            remedy="give an s3:// address, or pip install -c infra/constraints.txt 'moto[s3,server]'",
        )
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as server:
        try:
            endpoint = _address(server)
            request = urllib.request.Request(f"{endpoint}/{_BUCKET}", method="PUT")
            urllib.request.urlopen(request).close()
            with mock.patch.dict(os.environ, _environment(endpoint)):
                yield Place(f"s3://{_BUCKET}", server.pid)
        finally:
            server.kill()


def _address(server: "subprocess.Popen[str]") -> str:
    """Where the server says that it listens."""
    assert server.stdout is not None
    said = ""
    for line in server.stdout:
        said += line
        found = _ADDRESS.search(line)
        if found:
            return found[1]
    raise BenchError(f"moto's server did not start: {said}", remedy="give an s3:// address instead")


def _environment(endpoint: str) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": endpoint,
        "S3_ENDPOINT_URL": endpoint,  # the peer's name for it
        "AWS_ACCESS_KEY_ID": "bench",
        "AWS_SECRET_ACCESS_KEY": "bench",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
