"""An S3 bucket as an object store: on Amazon S3, or on any S3-compatible server that supports `If-None-Match`.

boto3 finds credentials, region and endpoint (environment, ~/.aws, instance role). AWS_ENDPOINT_URL is the URL of
another server. `_call_with_retries` retries failed operations until the patience is used up; botocore's own retries are
off. Every answer is checked: an invalid one counts as a failure.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError
from botocore.session import get_session

from data_service.store.base import Entry, join_path
from data_service.store.bucket import BucketStore, Connection, Scheme
from data_service.store.errors import BadUri, KeyMissing, StoreError
from data_service.store.retries import RetryLimit
from data_service.store.s3_errors import FAILURES, error_code, translate_error
from data_service.store.s3_transfer import MAX_DELETIONS, Deletion, Download, Listing, Upload, head_object
from data_service.store.upload_sources import PART_BYTES, WRITER_FIELD, UploadSource

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import ListObjectsV2OutputTypeDef

_READ_TIMEOUT_S = 60.0  # seconds without data after which a connection counts as dead
_METADATA_TIMEOUT_S = 5  # time limit in seconds of an instance's metadata service (botocore's default: 1)

for _library in ("botocore", "boto3", "urllib3"):  # their warnings are hidden: failures are retried here
    logging.getLogger(_library).addHandler(logging.NullHandler())


class _Connection(Connection["S3Client"]):
    def __reduce__(self) -> tuple[type["_Connection"], tuple[()]]:
        return (_Connection, ())

    def _connect(self) -> "S3Client":
        elsewhere = any(os.environ.get(name) for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"))
        config = Config(
            retries={"mode": "standard", "total_max_attempts": 1},
            connect_timeout=10,
            read_timeout=_READ_TIMEOUT_S,
            max_pool_connections=32,
            tcp_keepalive=True,
            s3={"addressing_style": "path"} if elsewhere else None,  # other servers: rarely a host name per bucket
            # Servers from before 2024 reject checksums in trailers. Readers verify the data by their own hashes.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        core = get_session()
        if core.get_config_variable("metadata_service_timeout") == 1:
            core.set_config_variable("metadata_service_timeout", _METADATA_TIMEOUT_S)
        try:
            return boto3.Session(botocore_session=core).client("s3", config=config)
        except ValueError as error:
            raise BadUri.for_uri("AWS_ENDPOINT_URL", str(error)) from error


@dataclass(frozen=True)
class S3Store(BucketStore["S3Client"]):
    """A store of objects on S3. See `BucketStore`."""

    prefix: str = ""
    patience_s: float = 120.0
    _connection: Connection["S3Client"] = field(default_factory=_Connection, repr=False, compare=False)
    scheme: Scheme = "s3"

    _failure_types = FAILURES
    _single_upload_bytes = 2 * PART_BYTES
    _translate_error = staticmethod(translate_error)

    def entry(self, key: str) -> Entry | None:
        name = self._object_name(key)

        def request_metadata(client: "S3Client") -> Entry | None:
            stored = head_object(client, self.bucket, name)
            return None if stored is None else Entry(key, stored["ContentLength"], stored.get("ETag", ""))

        return self._call_with_retries(name, request_metadata)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        root = f"{self.prefix}/" if self.prefix else ""
        for page in self._iter_pages(Listing(self.bucket, root + prefix, after=root)):
            for item in page.get("Contents", ()):
                yield Entry(item["Key"].removeprefix(root), item["Size"], item.get("ETag", ""))

    def folders(self) -> Iterator[str]:
        root = f"{self.prefix}/" if self.prefix else ""
        for page in self._iter_pages(Listing(self.bucket, root, delimiter="/")):
            for item in page.get("CommonPrefixes", ()):
                yield item["Prefix"].removeprefix(root).rstrip("/")

    def delete(self, key: str) -> None:
        name = self._object_name(key)
        with suppress(KeyMissing):
            self._call_with_retries(name, lambda client: client.delete_object(Bucket=self.bucket, Key=name))

    def delete_many(self, keys: Sequence[str]) -> None:
        for start in range(0, len(keys), MAX_DELETIONS):
            batch = keys[start : start + MAX_DELETIONS]
            try:
                self._call_with_retries(
                    self.prefix, Deletion(self.bucket, [self._object_name(key) for key in batch]).try_delete
                )
            except StoreError as error:
                if type(error) is not StoreError:
                    raise
                # The server does not support batch deletion.
                super().delete_many(batch)

    def clock(self) -> float | None:
        """Return the time in the Date header of an answer.

        A refusal has this header, too. So the time is known even if this machine's clock is wrong and the server
        therefore refuses the request's signature.
        """

        def server_time_s(client: "S3Client") -> float | None:
            try:
                answer = client.list_objects_v2(Bucket=self.bucket, Prefix=self.prefix, MaxKeys=1)
                return _server_time(answer)
            except ClientError as error:
                date = _server_time(error.response)
                if date is None:
                    raise
                return date

        return self._call_with_retries(self.prefix, server_time_s)

    def age(self, key: str) -> float | None:
        """Return the age from a single answer, which holds the object's time of change and the server's time."""
        name = self._object_name(key)

        def object_age_s(client: "S3Client") -> float | None:
            stored = head_object(client, self.bucket, name)
            if stored is None:
                return None
            now = _server_time(stored)
            return max(0.0, (time.time() if now is None else now) - stored["LastModified"].timestamp())

        return self._call_with_retries(name, object_age_s)

    def remove_leftovers(self, folder: str, *, older_than_key: str | None) -> int:
        """Abort unfinished multipart uploads, at most 1,000 per call. Their parts are billed until then."""
        start = join_path(self.prefix, folder)
        start += "/" if start else ""
        written = None if older_than_key is None else self._write_time(older_than_key)

        def find_stale_uploads(client: "S3Client") -> list[tuple[str, str]]:
            answer = client.list_multipart_uploads(Bucket=self.bucket, Prefix=start)
            return [
                (item["Key"], item["UploadId"])
                for item in answer.get("Uploads", ())
                if written is None or item["Initiated"] < written
            ]

        uploads = self._call_with_retries(start, find_stale_uploads)
        for name, number in uploads:
            with suppress(KeyMissing):
                self._abort_upload(name, number)
        return len(uploads)

    def _write_time(self, key: str) -> datetime:
        """Return when the object was written, by the store's clock; the earliest datetime if it is absent."""
        stored = self._call_with_retries(
            self._object_name(key), lambda client: head_object(client, self.bucket, self._object_name(key))
        )
        return datetime.min.replace(tzinfo=UTC) if stored is None else stored["LastModified"]

    def _abort_upload(self, name: str, upload_id: str) -> None:
        def abort_upload(client: "S3Client") -> None:
            try:
                client.abort_multipart_upload(Bucket=self.bucket, Key=name, UploadId=upload_id)
            except ClientError as error:
                # NoSuchUpload means that the upload was completed or aborted meanwhile.
                if error_code(error) != "NoSuchUpload":
                    raise

        self._call_with_retries(name, abort_upload)

    def _iter_pages(self, listing: Listing) -> "Iterator[ListObjectsV2OutputTypeDef]":
        while listing.more:
            yield self._call_with_retries(listing.prefix, listing.request_next_page)

    def _download(self, key: str, start: int, length: int | None) -> bytes:
        name, patience = self._object_name(key), RetryLimit(self.patience_s)
        download = Download(self.bucket, name, patience.record_progress, start, length)
        return self._call_with_retries(name, download.try_download, patience)

    def _create_object(self, name: str, body: bytes, writer: str, client: "S3Client") -> bool:
        try:
            client.put_object(Bucket=self.bucket, Key=name, Body=body, IfNoneMatch="*", Metadata={WRITER_FIELD: writer})
        except ClientError as error:
            if error_code(error) not in ("PreconditionFailed", "412"):
                raise
            return False
        return True

    def _find_writer(self, name: str, client: "S3Client") -> str | None:
        stored = head_object(client, self.bucket, name)
        return None if stored is None else stored["Metadata"].get(WRITER_FIELD, "")

    def _put_object(self, name: str, body: bytes, client: "S3Client") -> object:
        return client.put_object(Bucket=self.bucket, Key=name, Body=body)

    def _put_in_parts(
        self,
        name: str,
        source: UploadSource,
        patience: RetryLimit,
        report_reached: Callable[[int], None],
    ) -> None:
        upload = Upload(self.bucket, name, source, report_reached)
        try:
            self._call_with_retries(name, upload.try_upload, patience)
        except BaseException:
            with suppress(StoreError):
                self._try_once(name, upload.abort)
            raise


def _server_time(answer: Mapping[str, Any]) -> float | None:
    """Return the answer's Date header in seconds since 1970; None without one. Raises ValueError: not a date."""
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    return None if date is None else parsedate_to_datetime(date).timestamp()
