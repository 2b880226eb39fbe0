"""An S3 bucket as an object store: Amazon's, or any server with its protocol that knows `If-None-Match`.

Credentials, region and endpoint come from where boto3 looks for them (environment, ~/.aws, instance role);
the endpoint of another server is AWS_ENDPOINT_URL. There are two layers of retries: botocore repeats single
requests (so one failed part does not repeat an upload), and `_call` repeats whole operations, which also
covers bodies that break off half-way, until `patience_s` is used up.
"""

import io
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, TypeVar
from uuid import uuid4

import boto3
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from tenacity import (
    RetryCallState,
    Retrying,
    before_sleep_log,
    retry_if_exception_type,
    stop_after_delay,
    wait_random_exponential,
)

from data_service.store import retries
from data_service.store.base import Entry
from data_service.store.errors import BadUri, CredentialsExpired, KeyMissing, StoreUnavailable, Truncated
from data_service.store.keys import checked, child
from data_service.store.s3_errors import code, translated

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef

_log = logging.getLogger(__name__)
_log_retry = before_sleep_log(_log, logging.WARNING)
_T = TypeVar("_T")

_PART = 16 << 20
_TRANSFER = TransferConfig(multipart_threshold=2 * _PART, multipart_chunksize=_PART, max_concurrency=4)
_SILENCE_S = 60.0  # a connection that says nothing for so long is dead
_WRITER = "writer"  # the metadata field by which a conditional put knows its own object again


class _Connection:
    """One client for all threads of a process; a copy elsewhere (pickled or forked) makes its own."""

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

    def forget(self) -> None:
        """The next request looks for credentials anew."""
        with self._lock:
            self._client = None


def _again(state: RetryCallState) -> None:
    retries.count()
    _log_retry(state)


def _connect() -> "S3Client":
    elsewhere = any(os.environ.get(name) for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"))
    config = Config(
        retries={"mode": "standard", "total_max_attempts": 4},
        connect_timeout=10,
        read_timeout=_SILENCE_S,
        max_pool_connections=32,
        tcp_keepalive=True,
        s3={"addressing_style": "path"} if elsewhere else None,  # own servers rarely have a name per bucket
        # Checksums in trailers are unknown to servers from before 2024; our readers hash what they read.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    try:
        return boto3.Session().client("s3", config=config)
    except ValueError as error:
        raise BadUri.at("AWS_ENDPOINT_URL", str(error)) from error


@dataclass(frozen=True)
class S3Store:
    """Objects of `bucket` whose keys start with `prefix` + "/". See `Store`. Picklable, safe for threads.

    `patience_s` is how long an operation is retried, in seconds, before it fails.
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
        name = self._name(key)
        return self._call(name, lambda client: client.get_object(Bucket=self.bucket, Key=name)["Body"].read())

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if length == 0:  # no range can say so; only the key can be missing
            return b"" if self.size(key) is not None else self.get(key)
        name = self._name(key)
        wanted = f"bytes={start}-{start + length - 1}"

        def read(client: "S3Client") -> bytes:
            try:
                answer = client.get_object(Bucket=self.bucket, Key=name, Range=wanted)
                total = int(answer["ContentRange"].rpartition("/")[2])
            except ClientError as error:
                if code(error) not in ("InvalidRange", "416"):
                    raise
                total = client.head_object(Bucket=self.bucket, Key=name)["ContentLength"]
                raise Truncated.at(self._full(name), start, length, total) from error
            if total < start + length:
                answer["Body"].close()
                raise Truncated.at(self._full(name), start, length, total)
            return answer["Body"].read()

        return self._call(name, read)

    def put(self, key: str, data: bytes | memoryview) -> None:
        name, body = self._name(key), bytes(data)
        self._call(name, lambda client: client.put_object(Bucket=self.bucket, Key=name, Body=body))

    def put_if_absent(self, key: str, data: bytes | memoryview) -> bool:
        name, body, writer = self._name(key), bytes(data), uuid4().hex

        def write(client: "S3Client") -> bool:
            try:
                client.put_object(
                    Bucket=self.bucket, Key=name, Body=body, IfNoneMatch="*", Metadata={_WRITER: writer}
                )
            except ClientError as error:
                if code(error) not in ("PreconditionFailed", "412"):
                    raise
                # It may have been us: an attempt that succeeded although its answer was lost.
                stored = client.head_object(Bucket=self.bucket, Key=name)
                return stored["Metadata"].get(_WRITER) == writer
            return True

        return self._call(name, write)

    def put_buffers(self, key: str, buffers: Sequence[memoryview]) -> None:
        self._upload(key, lambda: io.BufferedReader(_Joined(buffers), 1 << 20))

    def put_file(self, key: str, path: Path) -> None:
        self._upload(key, lambda: path.open("rb"))

    def size(self, key: str) -> int | None:
        name = self._name(key)
        try:
            return self._call(
                name, lambda client: client.head_object(Bucket=self.bucket, Key=name)["ContentLength"]
            )
        except KeyMissing:
            return None

    def list(self, prefix: str = "") -> Iterator[Entry]:
        root = f"{self.prefix}/" if self.prefix else ""
        last, more = root, True
        while more:
            page = self._page(root + prefix, last)
            more = page["IsTruncated"]
            for item in page.get("Contents", ()):
                last = item["Key"]
                yield Entry(last.removeprefix(root), item["Size"])

    def folders(self) -> Iterator[str]:
        root = f"{self.prefix}/" if self.prefix else ""

        def read(client: "S3Client") -> list[str]:
            pages = client.get_paginator("list_objects_v2").paginate(
                Bucket=self.bucket, Prefix=root, Delimiter="/"
            )
            return [item["Prefix"] for page in pages for item in page.get("CommonPrefixes", ())]

        yield from (name.removeprefix(root).rstrip("/") for name in self._call(root, read))

    def delete(self, key: str) -> None:
        name = self._name(key)
        self._call(name, lambda client: client.delete_object(Bucket=self.bucket, Key=name))

    def clock(self) -> float | None:
        """From the Date of an answer, be it a refusal: that is what a request signed by a wrong clock gets."""

        def ask(client: "S3Client") -> str | None:
            try:
                answer = client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix, MaxKeys=1)
                return answer["ResponseMetadata"]["HTTPHeaders"].get("date")
            except ClientError as error:
                date: str | None = error.response["ResponseMetadata"].get("HTTPHeaders", {}).get("date")
                if date is None:
                    raise
                return date

        date = self._call(self.prefix, ask)
        return None if date is None else parsedate_to_datetime(date).timestamp()

    def remove_leftovers(self, folder: str, *, older_than_s: float) -> int:
        """Aborts unfinished multipart uploads (1,000 a call): their parts are kept, and paid for, so long."""
        deadline = datetime.fromtimestamp(time.time() - older_than_s, UTC)
        start = child(self.prefix, folder)
        start += "/" if start else ""
        answer = self._call(
            start, lambda client: client.list_multipart_uploads(Bucket=self.bucket, Prefix=start)
        )
        stale = [item for item in answer.get("Uploads", ()) if item["Initiated"] < deadline]
        for item in stale:
            self._abort(item["Key"], item["UploadId"])
        return len(stale)

    def _page(self, start: str, after: str) -> "ListObjectsV2OutputTypeDef":
        return self._call(
            start,
            lambda client: client.list_objects_v2(Bucket=self.bucket, Prefix=start, StartAfter=after),
        )

    def _abort(self, name: str, upload: str) -> None:
        self._call(
            name, lambda client: client.abort_multipart_upload(Bucket=self.bucket, Key=name, UploadId=upload)
        )

    def _upload(self, key: str, source: Callable[[], BinaryIO]) -> None:
        name = self._name(key)

        def send(client: "S3Client") -> None:
            with source() as body:
                client.upload_fileobj(body, self.bucket, name, Config=_TRANSFER)

        self._call(name, send)

    def _name(self, key: str) -> str:
        return child(self.prefix, checked(self.uri, key))

    def _full(self, name: str) -> str:
        return f"s3://{self.bucket}/{name}"

    def _call(self, name: str, operation: Callable[["S3Client"], _T]) -> _T:
        """Runs the operation, again while its failure may pass, and turns the last failure into our error."""
        attempts = Retrying(
            retry=retry_if_exception_type((StoreUnavailable, CredentialsExpired)),
            wait=wait_random_exponential(multiplier=0.2, max=15),
            stop=stop_after_delay(self.patience_s),
            before_sleep=_again,
            reraise=True,
        )
        result: _T = attempts(self._once, name, operation)
        return result

    def _once(self, name: str, operation: Callable[["S3Client"], _T]) -> _T:
        try:
            return operation(self._connection.client())
        except (BotoCoreError, ClientError) as error:
            ours = translated(error, self._full(name))
            if isinstance(ours, CredentialsExpired):
                self._connection.forget()
            raise ours from error


class _Joined(io.RawIOBase):
    """Buffers laid end to end, as a file to read: an upload without a second copy of what it uploads."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = [buffer.cast("B") for buffer in buffers]
        self._size = sum(len(buffer) for buffer in self._buffers)
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readinto(self, target: memoryview) -> int:  # type: ignore[override]
        start = self._position
        for buffer in self._buffers:
            if start < len(buffer):
                count = min(len(buffer) - start, len(target))
                target[:count] = buffer[start : start + count]
                self._position += count
                return count
            start -= len(buffer)
        return 0
