"""Azurite, Microsoft's emulator of Azure's storage, as tests see it: a real server, of npm's package `azurite`.

It checks signatures, conditions and the lists of blocks as Azure does. It knows no managed identity and no accounts
with a hierarchical namespace, and it is never busy.
"""

import base64
import hashlib
import hmac
import http.client
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import formatdate
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from tests.support.stores.fault_proxy import Errors
from tests.support.stores.service import Service
from tests.support.stores.shared import answers, free_port, shared, stop, wait

PROGRAM = "azurite-blob"
PACKAGE = "azurite@3"
_ACCOUNT = "tests"


@dataclass(frozen=True)
class AzuriteServer(Service):
    """A server and an account on it, which has two keys, as Azure's have. `endpoint` ends with the account's name."""

    endpoint: str
    key: str
    second_key: str
    scheme: ClassVar[str] = "az"
    variables: ClassVar[str] = "AZURE_"
    errors: ClassVar[Errors] = {
        "error 500": (500, "InternalError"),
        "slow down": (503, "ServerBusy"),
        "expired token": (401, "InvalidAuthenticationInfo"),
        "unknown key": (403, "AuthenticationFailed"),
        "denied": (403, "AuthorizationPermissionMismatch"),
        "no such key": (404, "BlobNotFound"),
    }

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ENDPOINT": self.endpoint,
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key,
        }

    def reach(self, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{endpoint}/{_ACCOUNT}")

    def renew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", self.second_key)

    def forge(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(bytes(32)).decode())

    def take_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Takes this process's key away, and the machine's service for tokens."""
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
        monkeypatch.setenv("AZURE_MSI_ENDPOINT", "http://127.0.0.1:9/token")

    def new_bucket(self) -> str:
        name = f"test-{uuid4().hex[:12]}"
        self._request("PUT", name, "restype:container")
        return name

    def _request(self, method: str, name: str, query: str) -> None:
        """A request signed with the account's key, by Azure's rules for "Shared Key"; obstore creates no containers."""
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        lines = [f"{key}:{value}" for key, value in headers.items()]
        resource = f"/{_ACCOUNT}{urlsplit(self.endpoint).path}/{name}"
        text = "\n".join([method, *[""] * 11, *lines, resource, query])
        digest = hmac.digest(base64.b64decode(self.key), text.encode(), hashlib.sha256)
        headers["Authorization"] = f"SharedKey {_ACCOUNT}:{base64.b64encode(digest).decode()}"
        place = urlsplit(self.endpoint)
        connection = http.client.HTTPConnection(place.netloc, timeout=60)
        connection.request(
            method,
            f"{place.path}/{name}?{query.replace(':', '=')}",
            headers=headers | {"Content-Length": "0"},
        )
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        assert answer.status < 300, body


def why_not() -> str | None:
    """Why Azurite cannot run here, or None if it can."""
    return None if shutil.which(PROGRAM) else f"{PROGRAM} not installed (npm install -g {PACKAGE})"


@contextmanager
def shared_server(folder: Path) -> Iterator[AzuriteServer]:
    """The server of all processes that share `folder`, ready for requests."""
    with shared(folder, "azurite", _start) as server:
        yield AzuriteServer(**server)


def _start(folder: Path) -> tuple[dict[str, str], list[int]]:
    port = free_port()
    key, second = (base64.b64encode(os.urandom(32)).decode() for _ in range(2))
    options = ("--inMemoryPersistence", "--silent", "--skipApiVersionCheck", "--disableTelemetry")
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [PROGRAM, *options, "--blobHost", "127.0.0.1", "--blobPort", str(port)],
            env={**os.environ, "AZURITE_ACCOUNTS": f"{_ACCOUNT}:{key}:{second}"},
            stdout=log,
            stderr=log,
        )
    try:
        wait(lambda: answers(port), process, "Azurite", seconds=90)
    except BaseException:
        stop([process.pid])
        raise
    place = f"http://127.0.0.1:{port}/{_ACCOUNT}"
    return {"endpoint": place, "key": key, "second_key": second}, [process.pid]
