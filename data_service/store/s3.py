"""An S3 bucket as an object store: Amazon's, or any server with its protocol that knows `If-None-Match`.

Credentials, region and endpoint come from where boto3 looks for them (environment, ~/.aws, instance role). The endpoint
of another server is AWS_ENDPOINT_URL. `_call` retries failed operations until the patience is used up; botocore itself
retries nothing. Every answer is checked: an invalid one counts as a failure.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.session import get_session

from data_service.store.base import Entry, checked, child
from data_service.store.errors import (
    BadUri,
    CredentialsExpired,
    CredentialsMissing,
    KeyMissing,
    StoreError,
    StoreUnavailable,
)
from data_service.store.retries import Patience, outage_of, retried
from data_service.store.s3_errors import FAILURES, code, translated
from data_service.store.s3_transfer import (
    DELETED,
    Deletion,
    Download,
    Listing,
    Upload,
    head,
)
from data_service.store.upload_sources import PART, WRITER, Buffers, LocalFile, both

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef

_T = TypeVar("_T")

_SILENCE_S = 60.0  # a connection without data for so long counts as dead
_METADATA_S = (
    5  # for an answer of a cloud's metadata service, where nothing else is set: botocore's 1 is short
)
_VALID_BEFORE = threading.Event()  # this process has had credentials that a server accepted

for _library in ("botocore", "boto3", "urllib3"):  # they warn of what is dealt with here
    logging.getLogger(_library).addHandler(logging.NullHandler())


class _Connection:
    """One S3 client for all threads of a process. A copy in another process (pickled or forked) creates its own."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._client: S3Client | None = None
        self._owner = 0

    def __reduce__(self) -> tuple[type["_Connection"], tuple[()]]:
        return (_Connection, ())

    def client(self) -> "S3Client":
        with self._lock:
            if self._client is None or self._owner != os.getpid():
                self._client, self._owner = _connect(), os.getpid()
            return self._client

    def forget(self, client: "S3Client | None") -> None:
        """Drop `client`, so that the next request looks for credentials again; do nothing if it was dropped already."""
        with self._lock:
            if self._client is client:
                self._client = None


def _connect() -> "S3Client":
    elsewhere = any(os.environ.get(name) for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"))
    config = Config(
        retries={"mode": "standard", "total_max_attempts": 1},
        connect_timeout=10,
        read_timeout=_SILENCE_S,
        max_pool_connections=32,
        tcp_keepalive=True,
        s3={"addressing_style": "path"} if elsewhere else None,  # own servers rarely have a name per bucket
        # Checksums in trailers are unknown to servers from before 2024; our readers hash what they read.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    core = get_session()
    if core.get_config_variable("metadata_service_timeout") == 1:
        core.set_config_variable("metadata_service_timeout", _METADATA_S)
    try:
        return boto3.Session(botocore_session=core).client("s3", config=config)
    except ValueError as error:
        raise BadUri.at("AWS_ENDPOINT_URL", str(error)) from error


@dataclass(frozen=True)
class S3Store:
    """A store of the objects of `bucket` whose keys start with `prefix` + "/". See `Store`. Picklable and thread-safe.

    `patience_s`: seconds without progress after which a failing operation is given up.
    """

    bucket: str
    prefix: str = ""
    patience_s: float = 120.0
    _connection: _Connection = field(default_factory=_Connection, repr=False, compare=False)

    @property
    def uri(self) -> str:
        return f"s3://{child(self.bucket, self.prefix)}"

    def at(self, prefix: str) -> "S3Store":
        below = checked(self.uri, child(prefix, ""))
        return S3Store(self.bucket, child(self.prefix, below), self.patience_s, self._connection)

    def get(self, key: str) -> bytes:
        return self._download(key, 0, None)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if length == 0:  # no range can say so; only the key can be missing
            return b"" if self.size(key) is not None else self.get(key)
        return self._download(key, start, length)

    def put(self, key: str, data: bytes | memoryview) -> None:
        name, body = self._name(key), bytes(data)
        self._call(name, lambda client: client.put_object(Bucket=self.bucket, Key=name, Body=body))

    def put_if_absent(self, key: str, data: bytes | memoryview) -> bool:
        name, body, writer = self._name(key), bytes(data), uuid4().hex

        def write(client: "S3Client") -> bool:
            try:
                client.put_object(
                    Bucket=self.bucket, Key=name, Body=body, IfNoneMatch="*", Metadata={WRITER: writer}
                )
            except ClientError as error:
                if code(error) not in ("PreconditionFailed", "412"):
                    raise
                # It may have been us: an attempt that succeeded although its answer was lost.
                stored = head(client, self.bucket, name)
                if stored is None:  # deleted since
                    raise StoreUnavailable.at(self._full(name), "deleted while it was created") from error
                return stored["Metadata"].get(WRITER) == writer
            return True

        return self._call(name, write)

    def put_buffers(
        self, key: str, buffers: Sequence[memoryview], sent: Callable[[int], None] | None = None
    ) -> None:
        self._upload(key, Buffers(buffers), sent)

    def put_file(self, key: str, path: Path) -> None:
        self._upload(key, LocalFile(path), None)

    def size(self, key: str) -> int | None:
        entry = self.entry(key)
        return None if entry is None else entry.size

    def entry(self, key: str) -> Entry | None:
        name = self._name(key)

        def ask(client: "S3Client") -> Entry | None:
            stored = head(client, self.bucket, name)
            return None if stored is None else Entry(key, stored["ContentLength"], stored.get("ETag", ""))

        return self._call(name, ask)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        root = f"{self.prefix}/" if self.prefix else ""
        for page in self._pages(Listing(self.bucket, root + prefix, after=root)):
            for item in page.get("Contents", ()):
                yield Entry(item["Key"].removeprefix(root), item["Size"], item.get("ETag", ""))

    def folders(self) -> Iterator[str]:
        root = f"{self.prefix}/" if self.prefix else ""
        for page in self._pages(Listing(self.bucket, root, delimiter="/")):
            for item in page.get("CommonPrefixes", ()):
                yield item["Prefix"].removeprefix(root).rstrip("/")

    def delete(self, key: str) -> None:
        name = self._name(key)
        with suppress(KeyMissing):
            self._call(name, lambda client: client.delete_object(Bucket=self.bucket, Key=name))

    def delete_many(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), DELETED):
            batch = keys[start : start + DELETED]
            try:
                self._call(self.prefix, Deletion(self.bucket, [self._name(key) for key in batch]).attempt)
            except StoreError as error:
                if type(error) is not StoreError:
                    raise
                for key in batch:  # the server does not know this request
                    self.delete(key)

    def clock(self) -> float | None:
        """Return the time in the Date header of an answer.

        A refusal has this header, too. So the time is known even if our clock is wrong and the server therefore refuses
        our signature.
        """

        def ask(client: "S3Client") -> float | None:
            try:
                answer = client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix, MaxKeys=1)
                return _date(answer)
            except ClientError as error:
                date = _date(error.response)
                if date is None:
                    raise
                return date

        return self._call(self.prefix, ask)

    def age(self, key: str) -> float | None:
        """Return the age from one answer, which holds both the time of the object and the server's time."""
        name = self._name(key)

        def ask(client: "S3Client") -> float | None:
            stored = head(client, self.bucket, name)
            if stored is None:
                return None
            now = _date(stored)
            return max(0.0, (time.time() if now is None else now) - stored["LastModified"].timestamp())

        return self._call(name, ask)

    def remove_leftovers(self, folder: str, *, older_than_s: float) -> int:
        """Abort unfinished multipart uploads (at most 1,000 a call), whose parts are stored and billed until then."""
        start = child(self.prefix, folder)
        start += "/" if start else ""

        def stale(client: "S3Client") -> list[tuple[str, str]]:
            answer = client.list_multipart_uploads(Bucket=self.bucket, Prefix=start)
            deadline = datetime.fromtimestamp((_date(answer) or time.time()) - older_than_s, UTC)
            found = [item for item in answer.get("Uploads", ()) if item["Initiated"] < deadline]
            return [(item["Key"], item["UploadId"]) for item in found]

        uploads = self._call(start, stale)
        for name, number in uploads:
            with suppress(KeyMissing):
                self._abort(name, number)
        return len(uploads)

    def _abort(self, name: str, upload: str) -> None:
        def abort(client: "S3Client") -> None:
            try:
                client.abort_multipart_upload(Bucket=self.bucket, Key=name, UploadId=upload)
            except ClientError as error:
                if code(error) != "NoSuchUpload":  # its writer finished meanwhile
                    raise

        self._call(name, abort)

    def _pages(self, listing: Listing) -> "Iterator[ListObjectsV2OutputTypeDef]":
        while listing.more:
            yield self._call(listing.prefix, listing.attempt)

    def _download(self, key: str, start: int, length: int | None) -> bytes:
        name, patience = self._name(key), Patience(self.patience_s)
        download = Download(self.bucket, name, patience.reached, start, length)
        return self._call(name, download.attempt, patience)

    def _upload(self, key: str, source: Buffers | LocalFile, sent: Callable[[int], None] | None) -> None:
        name, patience = self._name(key), Patience(self.patience_s)
        if source.size <= 2 * PART:
            body = source.read(0, source.size)
            self._call(name, lambda client: client.put_object(Bucket=self.bucket, Key=name, Body=body))
            if sent is not None:
                sent(source.size)
            return
        upload = Upload(self.bucket, name, source, both(patience.reached, sent))
        try:
            self._call(name, upload.attempt, patience)
        except BaseException:
            with suppress(StoreError):
                self._once(name, upload.abort)
            raise

    def _name(self, key: str) -> str:
        return child(self.prefix, checked(self.uri, key))

    def _full(self, name: str) -> str:
        return f"s3://{self.bucket}/{name}"

    def _call(self, name: str, operation: Callable[["S3Client"], _T], patience: Patience | None = None) -> _T:
        """Run the operation; retry it while its failures are transient; raise the last failure as our error."""
        patience = Patience(self.patience_s) if patience is None else patience
        return retried(lambda: self._once(name, operation), patience, outage_of(f"s3://{self.bucket}"))

    def _once(self, name: str, operation: Callable[["S3Client"], _T]) -> _T:
        client = None
        try:
            client = self._connection.client()
            result = operation(client)
        except FAILURES as error:
            ours = translated(error, self._full(name), valid_before=_VALID_BEFORE.is_set())
            if isinstance(ours, CredentialsExpired | CredentialsMissing):
                self._connection.forget(client)
            raise ours from error
        _VALID_BEFORE.set()
        return result


def _date(answer: Mapping[str, Any]) -> float | None:
    """Return the time of the answer by the server's clock, in seconds since 1970. Raises ValueError: not a date."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return None if date is None else parsedate_to_datetime(date).timestamp()
