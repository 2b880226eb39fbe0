"""Requests to S3 that continue after a failure: a read with the missing bytes, an upload with the missing parts, a
listing with the next page, a deletion with the remaining objects.

Each call makes one attempt, and the object remembers its progress; `S3Store` repeats the attempts.
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast
from uuid import uuid4

from botocore.exceptions import ClientError

from data_service.store.errors import Truncated
from data_service.store.s3_errors import LOST_UPLOAD_CODES, error_code
from data_service.store.upload_sources import PART_BYTES, WRITER_FIELD, UploadSource

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import GetObjectOutputTypeDef, HeadObjectOutputTypeDef, ListObjectsV2OutputTypeDef


_MAX_PARTS = 10_000  # most parts of an upload: S3's limit
_CONCURRENT_PARTS = 4  # parts uploaded at the same time
_MAX_EMPTY_PAGES = 100  # empty pages in a row after which a listing counts as broken


@dataclass
class Listing:
    """A listing of the objects whose names start with `prefix` and sort after `after`, page by page. `delimiter`: "/"
    to list folders instead; `more`: whether further pages follow."""

    bucket: str
    prefix: str
    after: str = ""
    delimiter: str = ""
    more: bool = True
    _token: str = ""  # the server's token for the next page; "" if the page starts after the name `after`
    _empty: int = 0  # number of empty pages in a row

    def request_next_page(self, client: "S3Client") -> "ListObjectsV2OutputTypeDef":
        """Return the next page.

        Raises FAILURES: botocore's errors; ValueError or KeyError: the page is invalid or out of order.
        """
        page = client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix, **self._page_start())
        names = _page_names(page)
        self._check_page_names(names)
        more, token = page["IsTruncated"], ""
        if more and (self.delimiter or not names):
            token = page["NextContinuationToken"]
            if token == self._token or (not names and self._empty == _MAX_EMPTY_PAGES):
                raise ValueError("the listing does not end")
        self.more, self._token = more, token
        self.after, self._empty = max([self.after, *names]), 0 if names else self._empty + 1
        return page

    def _page_start(self) -> dict[str, Any]:
        """Return the request parameters of the next page: where it starts, and the delimiter.

        It starts after the last listed name where possible, because a token may expire while the caller is busy.
        """
        parameters = {"Delimiter": self.delimiter} if self.delimiter else {}
        if self._token:
            return parameters | {"ContinuationToken": self._token}
        return parameters | ({"StartAfter": self.after} if self.after else {})

    def _check_page_names(self, names: list[str]) -> None:
        if names and (min(names) <= self.after or len(set(names)) < len(names)):
            raise ValueError("a page of the listing repeats names of an earlier page")
        if not all(name.startswith(self.prefix) for name in names):
            raise ValueError("the listing holds keys without the requested prefix")


def _page_names(page: "ListObjectsV2OutputTypeDef") -> list[str]:
    """Return the names of the objects and folders in a page."""
    keys = [item["Key"] for item in page.get("Contents", ())]
    return keys + [item["Prefix"] for item in page.get("CommonPrefixes", ())]


MAX_DELETIONS = 1000  # objects in one request: S3's limit
_ABSENT_CODES = ("NoSuchKey", "NoSuchVersion")  # error codes of a batch deletion for objects that do not exist
_STATUS_BY_CODE = {"AccessDenied": 403}  # HTTP status for an error of a batch deletion; else 503


@dataclass
class Deletion:
    """A deletion of at most `MAX_DELETIONS` objects. `names`: names of the objects not deleted so far."""

    bucket: str
    names: list[str]

    def try_delete(self, client: "S3Client") -> None:
        """Delete the remaining objects. Raises FAILURES, a ClientError also if the server did not delete them all."""
        answer = client.delete_objects(
            Bucket=self.bucket, Delete={"Objects": [{"Key": name} for name in self.names], "Quiet": True}
        )
        refused = [error for error in answer.get("Errors", ()) if error["Code"] not in _ABSENT_CODES]
        self.names = [error["Key"] for error in refused]
        if refused:
            first = refused[0]
            status = _STATUS_BY_CODE.get(first["Code"], 503)
            response = {
                "Error": {"Code": first["Code"], "Message": f"{first['Key']}: {first.get('Message', '')}"},
                "ResponseMetadata": {"HTTPStatusCode": status},
            }
            raise ClientError(cast(Any, response), "DeleteObjects")


def head_object(client: "S3Client", bucket: str, name: str) -> "HeadObjectOutputTypeDef | None":
    """Return the metadata of an object; None if it does not exist. Raises FAILURES.

    If the server refuses the HEAD request, a GET request is made: only its answer states a reason.
    """
    try:
        return client.head_object(Bucket=bucket, Key=name)
    except ClientError as error:
        if error_code(error) in ("404", "NoSuchKey"):
            return None
        if error_code(error) not in ("400", "401", "403"):
            raise
        refused = error
    try:
        client.get_object(Bucket=bucket, Key=name, Range="bytes=0-0")["Body"].close()
    except ClientError as error:
        if error_code(error) not in ("InvalidRange", "416"):  # beyond the end: readable but empty
            raise
    raise ConnectionError(f"{refused}, although a GET request is allowed") from refused


@dataclass
class Download:
    """A read of an object, or of `length` bytes of it from byte `start`. `reached`: a function that is called with the
    number of bytes received so far."""

    bucket: str
    name: str
    reached: Callable[[int], object]
    start: int = 0
    length: int | None = None
    _version: str | None = None  # ETag of the object, from the first answer
    _pieces: list[bytes] = field(default_factory=list)
    _here: int = 0  # number of bytes received so far

    def try_download(self, client: "S3Client") -> bytes:
        """Return all requested bytes.

        Raises:
            Truncated: the object ends before the last requested byte.
            FAILURES: botocore's errors. The next attempt continues where this one failed.
        """
        answer = self._request_body(client)
        with closing(answer["Body"]) as body:
            expected = self._expected_bytes(answer)
            while self._here < expected:
                piece = body.read(min(PART_BYTES, expected - self._here))
                if not piece:
                    raise ValueError(f"the answer's body ends after {self._here} of {expected} bytes")
                self._pieces.append(piece)
                self._here += len(piece)
                self.reached(self._here)
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def _request_body(self, client: "S3Client") -> "GetObjectOutputTypeDef":
        first = self.start + self._here
        if self.length is None and first == 0:
            return client.get_object(Bucket=self.bucket, Key=self.name)
        last = "" if self.length is None else self.start + self.length - 1
        try:
            return client.get_object(Bucket=self.bucket, Key=self.name, Range=f"bytes={first}-{last}")
        except ClientError as error:
            if error_code(error) not in ("InvalidRange", "416"):
                raise
            stored = head_object(client, self.bucket, self.name)
            if self._here or stored is None:
                raise self._object_changed_error() from error
            raise self._truncated_error(stored["ContentLength"]) from error

    def _expected_bytes(self, answer: "GetObjectOutputTypeDef") -> int:
        """Return how many bytes to read in all. Raises ValueError: the answer has other bytes; Truncated: too few."""
        first, total = 0, answer["ContentLength"]
        if "ContentRange" in answer:
            span, _, size = answer["ContentRange"].removeprefix("bytes ").partition("/")
            first, total = int(span.partition("-")[0]), int(size)
        version = answer["ETag"]
        if self._version not in (None, version) or first != self.start + self._here:
            raise self._object_changed_error()
        self._version = version
        if self.length is not None and total < self.start + self.length:
            raise self._truncated_error(total)
        return total if self.length is None else self.length

    def _object_changed_error(self) -> ValueError:
        """Discard the bytes read so far, so that the next attempt starts again; return the error to raise."""
        self._version, self._here = None, 0
        self._pieces.clear()
        return ValueError(
            "the answer holds other bytes than were requested, or the object was replaced while it was read"
        )

    def _truncated_error(self, size: int) -> Truncated:
        return Truncated.for_uri(f"s3://{self.bucket}/{self.name}", self.start, self.length or 0, size)


@dataclass
class Upload:
    """An upload of an object in parts. The object appears when the server has all parts. `reached`: function that gets
    the number of bytes on the server so far; never called by two threads at once."""

    bucket: str
    name: str
    source: UploadSource
    reached: Callable[[int], None]
    _writer: str = field(default_factory=lambda: uuid4().hex)
    _number: str | None = None  # the server's id of the upload; None before it begins
    _tags: dict[int, str] = field(default_factory=dict)  # ETags of the uploaded parts, by number
    _accepted: int = 0  # bytes of the uploaded parts
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def try_upload(self, client: "S3Client") -> None:
        """Send the missing parts and complete the upload. Raises FAILURES; the next attempt continues."""
        if self._number is None:
            begun = client.create_multipart_upload(
                Bucket=self.bucket, Key=self.name, Metadata={WRITER_FIELD: self._writer}
            )
            self._number = begun["UploadId"]
        try:
            self._send_missing_parts(client, self._number)
            parts = [{"PartNumber": number, "ETag": self._tags[number]} for number in sorted(self._tags)]
            client.complete_multipart_upload(
                Bucket=self.bucket,
                Key=self.name,
                UploadId=self._number,
                MultipartUpload={"Parts": parts},  # type: ignore[typeddict-item]
            )
        except ClientError as error:
            if error_code(error) not in LOST_UPLOAD_CODES and not self._is_upload_lost(client, self._number):
                raise
            if not self._is_own_object(client):  # an attempt with a lost answer may have completed it
                self._number, self._accepted = None, 0
                self._tags.clear()
                raise
        self._number = None

    def abort(self, client: "S3Client") -> None:
        """Delete the uploaded parts from the server. Raises FAILURES."""
        if self._number is not None:
            client.abort_multipart_upload(Bucket=self.bucket, Key=self.name, UploadId=self._number)

    def _send_missing_parts(self, client: "S3Client", upload_id: str) -> None:
        """Send the missing parts, several at a time. After the first failure no further part is sent."""
        size = max(PART_BYTES, -(-self.source.size // _MAX_PARTS))
        failures: list[BaseException] = []

        def send_part(part: int) -> None:
            if failures:
                return
            try:
                self._send_part(client, upload_id, part, size)
            except BaseException as error:
                failures.append(error)

        missing = [part for part in range(-(-self.source.size // size)) if part + 1 not in self._tags]
        with ThreadPoolExecutor(_CONCURRENT_PARTS, thread_name_prefix="upload") as pool:
            try:
                list(pool.map(send_part, missing))
            except BaseException as error:  # a signal such as Ctrl-C: `send_part` catches all errors
                failures.append(error)
                raise
        if failures:
            raise failures[0]

    def _send_part(self, client: "S3Client", upload_id: str, part: int, size: int) -> None:
        body = self.source.read(part * size, size)
        answer = client.upload_part(
            Bucket=self.bucket, Key=self.name, UploadId=upload_id, PartNumber=part + 1, Body=body
        )
        with self._lock:
            self._tags[part + 1] = answer["ETag"]
            self._accepted += len(body)
            self.reached(self._accepted)

    def _is_upload_lost(self, client: "S3Client", upload_id: str) -> bool:
        """Return whether the server no longer knows the upload. Then Ceph (radosgw 16.2.15) answers the completion with
        InternalError, but the listing of parts below with NoSuchKey."""
        try:
            client.list_parts(Bucket=self.bucket, Key=self.name, UploadId=upload_id, MaxParts=1)
        except ClientError as error:
            return error_code(error) in (*LOST_UPLOAD_CODES, "NoSuchKey")
        return False

    def _is_own_object(self, client: "S3Client") -> bool:
        stored = head_object(client, self.bucket, self.name)
        return stored is not None and stored["Metadata"].get(WRITER_FIELD) == self._writer
