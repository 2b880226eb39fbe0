"""A remote bucket as an object store: the common base of S3, Google Cloud Storage and Azure.

Keys lie below a prefix. Transient failures are retried; after refused credentials the environment is searched for
credentials again. The subclasses (`s3.py`, `cloud.py`) define the requests and translate their failures.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import Event, Lock
from typing import ClassVar, Generic, Literal, Self, TypeVar
from uuid import uuid4

from data_service.store.base import Store, check_key, join_path
from data_service.store.errors import CredentialsExpired, CredentialsMissing, StoreError, StoreUnavailable
from data_service.store.retries import RetryLimit, call_with_retries, get_outage
from data_service.store.upload_sources import Buffers, LocalFile, UploadSource

Scheme = Literal["s3", "gs", "az"]
_C = TypeVar("_C")  # type of the client
_T = TypeVar("_T")

# By URI scheme: set once a server has accepted this process's credentials.
_CREDENTIALS_ACCEPTED = {"s3": Event(), "gs": Event(), "az": Event()}


class Connection(ABC, Generic[_C]):
    """One client of a bucket, shared by all threads of a process. Unpickled or forked copies make their own client."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._client: _C | None = None
        self._owner = 0  # id of the process that made the client

    def client(self) -> _C:
        """Return this process's client; make it if there is none."""
        with self._lock:
            if self._client is None or self._owner != os.getpid():
                self._client, self._owner = self._connect(), os.getpid()
            return self._client

    def drop_client(self, client: _C | None) -> None:
        """Drop `client`, so that the next request reloads the credentials; do nothing if it was dropped already."""
        with self._lock:
            if self._client is client:
                self._client = None

    @abstractmethod
    def _connect(self) -> _C: ...


@dataclass(frozen=True)
class BucketStore(Store, ABC, Generic[_C]):
    """A store of the objects of `bucket` whose keys start with `prefix` + "/". See `Store`. Picklable and thread-safe.

    `patience_s`: seconds without progress after which a failing operation is given up.
    """

    bucket: str
    prefix: str
    patience_s: float
    _connection: Connection[_C] = field(repr=False, compare=False)
    scheme: Scheme

    _failure_types: ClassVar[tuple[type[Exception], ...]]  # errors of requests, for `_translate_error`
    _single_upload_bytes: ClassVar[int]  # size in bytes above which objects are uploaded in parts

    @property
    def uri(self) -> str:
        return f"{self.scheme}://{join_path(self.bucket, self.prefix)}"

    def with_prefix(self, prefix: str) -> Self:
        below = check_key(self.uri, join_path(prefix, ""))
        return replace(self, prefix=join_path(self.prefix, below))

    def get(self, key: str) -> bytes:
        return self._download(key, 0, None)

    def get_range(self, key: str, start: int, length: int) -> bytes:
        if length == 0:  # HTTP has no empty ranges; `get` raises KeyMissing
            return b"" if self.size(key) is not None else self.get(key)
        return self._download(key, start, length)

    def put_if_absent(self, key: str, data: bytes | memoryview) -> bool:
        name, body, writer = self._object_name(key), bytes(data), uuid4().hex

        def create_object(client: _C) -> bool:
            if self._create_object(name, body, writer, client):
                return True
            # An earlier attempt may have created the object, although its answer was lost: then the writer is ours.
            stored = self._find_writer(name, client)
            if stored is None:  # somebody deleted the object meanwhile
                raise StoreUnavailable.for_uri(self._object_uri(name), "deleted while it was created")
            return stored == writer

        return self._call_with_retries(name, create_object)

    def put_buffers(
        self, key: str, buffers: Sequence[memoryview], report_sent: Callable[[int], None] | None = None
    ) -> None:
        self._upload(key, Buffers(buffers), report_sent)

    def put_file(self, key: str, path: Path) -> None:
        self._upload(key, LocalFile(path), None)

    @abstractmethod
    def _download(self, key: str, start: int, length: int | None) -> bytes:
        """Return `length` bytes from byte `start`; all following bytes if `length` is None."""

    @abstractmethod
    def _create_object(self, name: str, body: bytes, writer: str, client: _C) -> bool:
        """Create an object by one request, with the random id `writer` as metadata. Return False if it exists."""

    @abstractmethod
    def _find_writer(self, name: str, client: _C) -> str | None:
        """Return the writer in an object's metadata ("" without one); None if the object does not exist."""

    @abstractmethod
    def _put_object(self, name: str, body: bytes, client: _C) -> object:
        """Create or replace an object by one request."""

    @abstractmethod
    def _put_in_parts(
        self,
        name: str,
        source: UploadSource,
        patience: RetryLimit,
        report_reached: Callable[[int], None],
    ) -> None:
        """Create or replace an object in parts. `report_reached` gets the number of bytes on the server so far."""

    @staticmethod
    @abstractmethod
    def _translate_error(error: Exception, uri: str, *, had_valid_credentials: bool) -> StoreError:
        """Return the StoreError for a failed request about `uri`; `error` is one of `_failure_types`."""

    def _upload(self, key: str, source: UploadSource, report_sent: Callable[[int], None] | None) -> None:
        name, patience = self._object_name(key), RetryLimit(self.patience_s)
        if source.size > self._single_upload_bytes:

            def report_reached(count: int) -> None:
                if patience.record_progress(count) and report_sent is not None:
                    report_sent(count)

            self._put_in_parts(name, source, patience, report_reached)
            return
        self._call_with_retries(name, partial(self._put_object, name, source.read(0, source.size)))
        if report_sent is not None:
            report_sent(source.size)

    def _object_name(self, key: str) -> str:
        """Return the object's name in the bucket: prefix and key. Raises BadUri: the key is not allowed."""
        name = join_path(self.prefix, check_key(self.uri, key))
        self._check_name(name, key)
        return name

    def _check_name(self, name: str, key: str) -> None:
        """Raise BadUri if the service does not allow objects of this name."""

    def _object_uri(self, name: str) -> str:
        return f"{self.scheme}://{self.bucket}/{name}"

    def _call_with_retries(
        self,
        name: str,
        operation: Callable[[_C], _T],
        patience: RetryLimit | None = None,
        *,
        signed: bool = True,
    ) -> _T:
        """Return the operation's result. Retry transient failures; raise the last failure as a StoreError.

        `signed`: whether the request carries credentials, so that a success proves them valid.
        """
        patience = RetryLimit(self.patience_s) if patience is None else patience
        outage = get_outage(f"{self.scheme}://{self.bucket}")
        return call_with_retries(lambda: self._try_once(name, operation, signed=signed), patience, outage)

    def _try_once(self, name: str, operation: Callable[[_C], _T], *, signed: bool = True) -> _T:
        """Call the operation once; raise its failure as a StoreError. Drop the client if its credentials failed."""
        client, known = None, _CREDENTIALS_ACCEPTED[self.scheme]
        try:
            client = self._connection.client()
            result = operation(client)
        except self._failure_types as error:
            ours = self._translate_error(error, self._object_uri(name), had_valid_credentials=known.is_set())
            if isinstance(ours, CredentialsExpired | CredentialsMissing):
                self._connection.drop_client(client)
            raise ours from error
        if signed:
            known.set()
        return result
