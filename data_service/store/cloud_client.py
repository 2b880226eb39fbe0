"""obstore's clients for Google Cloud Storage and Azure Blob Storage, and the server's time.

Account, credentials and endpoint come from the environment, from which obstore reads them. obstore retries no request;
`CloudStore` does. Only the parts of a large upload are retried by obstore, because an upload cannot be continued.
"""

import os
import re
import urllib.error
import urllib.request
from dataclasses import dataclass
from datetime import timedelta
from email.utils import parsedate_to_datetime
from http.client import HTTPException
from typing import Any
from urllib.parse import quote

from obstore.store import AzureStore, GCSStore

from data_service.store.bucket import Connection, Scheme
from data_service.store.errors import BadUri, StoreError

_READ_TIMEOUT_S = 60.0  # seconds without data after which a connection counts as dead
_PART_TIMEOUT_S = 120.0  # seconds in which a part of an upload must be sent and answered
_PART_RETRIES = 8  # retries of a part by obstore
_PART_RETRY_TIMEOUT_S = 60.0  # seconds after which obstore gives up a part
_ENDPOINT_VARIABLES = {  # environment variables that may name another server
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
_EMULATOR_URL = "http://127.0.0.1:10000/devstoreaccount1"  # default address of Azurite, Azure's emulator
_user_pid: int | None = None  # id of the process that used obstore first


@dataclass(frozen=True)
class CloudClient:
    """The clients of one bucket.

    Attributes:
        requests: obstore's client for all requests except large uploads.
        uploads: obstore's client for large uploads.
        place: URL of the bucket.
    """

    requests: Any
    uploads: Any
    place: str

    def request_server_time(self) -> float:
        """Return the server's time in seconds since 1970, in whole seconds.

        It is the Date header of the answer to a request without credentials, even if the server refuses the request.

        Raises OSError: there is no answer; ValueError: the answer has no valid Date.
        """
        request = urllib.request.Request(self.place, method="HEAD")
        try:
            with urllib.request.urlopen(request, timeout=_READ_TIMEOUT_S) as answer:
                headers = answer.headers
        except urllib.error.HTTPError as refusal:
            headers = refusal.headers
            refusal.close()
        except HTTPException as error:
            raise OSError(f"{self.place} gave no valid answer ({type(error).__name__})") from error
        date = headers.get("Date")
        if date is None:
            raise ValueError(f"{self.place} sent an answer without a Date header")
        return parsedate_to_datetime(date).timestamp()


class CloudConnection(Connection[CloudClient]):
    def __init__(self, scheme: Scheme, bucket: str) -> None:
        super().__init__()
        self._scheme, self._bucket = scheme, bucket

    def __reduce__(self) -> tuple[type["CloudConnection"], tuple[Scheme, str]]:
        return CloudConnection, (self._scheme, self._bucket)

    def client(self) -> CloudClient:
        """Return the clients.

        Raises:
            BadUri: the endpoint in the environment is not a URL.
            StoreError: this process was forked from one that had used obstore; obstore's threads are missing here.
            FAILURES: obstore's errors.
        """
        _ensure_not_forked(f"{self._scheme}://{self._bucket}")
        return super().client()

    def _connect(self) -> CloudClient:
        scheme, bucket, endpoint = self._scheme, self._bucket, _endpoint(self._scheme)
        emulated = scheme == "az" and os.environ.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("1", "true")
        plain = endpoint.startswith("http://") or emulated
        requests = _make_obstore(scheme, bucket, plain, read_timeout_s=_READ_TIMEOUT_S, retries=0)
        uploads = _make_obstore(scheme, bucket, plain, read_timeout_s=_PART_TIMEOUT_S, retries=_PART_RETRIES)
        if not endpoint:
            account = requests.config.get("account_name", "")
            away = "https://storage.googleapis.com" if scheme == "gs" else f"https://{account}.blob.core.windows.net"
            endpoint = _EMULATOR_URL if emulated else away
        return CloudClient(requests, uploads, f"{endpoint.rstrip('/')}/{quote(bucket)}")


def _ensure_not_forked(uri: str) -> None:
    global _user_pid
    if _user_pid is None:
        _user_pid = os.getpid()
    if _user_pid != os.getpid():
        raise StoreError(
            f"{uri} cannot be used in a process that was forked after the store was used",
            remedy="start the process by spawn or forkserver, as in DataLoader(multiprocessing_context='forkserver')",
        )


def _endpoint(scheme: Scheme) -> str:
    """Return the server's URL from the environment, "" without one. Raises BadUri: not a URL; obstore would panic."""
    name = next((name for name in _ENDPOINT_VARIABLES[scheme] if os.environ.get(name)), "")
    endpoint = os.environ.get(name, "")
    if endpoint and not re.match(r"https?://[^/\s]+", endpoint):
        raise BadUri(f"{name}={endpoint!r} is no URL", remedy=f"correct or unset {name}")
    return endpoint


def _make_obstore(scheme: Scheme, bucket: str, allow_http: bool, *, read_timeout_s: float, retries: int) -> Any:
    """Return obstore's client of a bucket. `allow_http`: whether HTTP without TLS is allowed."""
    options = {
        "allow_http": allow_http,
        "connect_timeout": timedelta(seconds=10),
        "read_timeout": timedelta(seconds=read_timeout_s),
        "timeout": timedelta(days=1),  # obstore's default is 30 s for a whole request
    }
    retry = {"max_retries": retries, "retry_timeout": timedelta(seconds=_PART_RETRY_TIMEOUT_S)}
    if scheme == "gs":
        return GCSStore(bucket, client_options=options, retry_config=retry)
    return AzureStore(bucket, client_options=options, retry_config=retry)
