"""A bucket of Google Cloud Storage (gs://) or a container of Azure Blob Storage (az://) as an object store, by obstore.

It gives the same guarantees as the S3 store: atomic puts, conditional creation, exact ranges, listings in key order.
This file hides the differences:

- obstore lists whole folders. The string prefix of keys is matched here.
- A retried creation can find the object that its own first attempt made. So every creation stores a random id as
  metadata, by which the writer recognises its object.
- Azure accounts with a hierarchical namespace may list names in another order, so Azure's listings are sorted here.
- obstore hides HTTP headers, so a separate HTTP request asks for the server's time.
- obstore cannot be used in a process that was forked after its first request.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import obstore
from obstore.exceptions import AlreadyExistsError

from data_service.store.base import Entry, parallel_map
from data_service.store.bucket import BucketStore, Scheme
from data_service.store.cloud_client import CloudClient, CloudConnection
from data_service.store.cloud_errors import FAILURES, translate_error
from data_service.store.cloud_transfer import (
    SINGLE_UPLOAD_BYTES,
    CloudDownload,
    CloudListing,
    head_object,
    upload_in_parts,
)
from data_service.store.errors import BadUri, KeyMissing
from data_service.store.retries import RetryLimit
from data_service.store.upload_sources import WRITER_FIELD, UploadSource

_MAX_DELETIONS = 256  # objects in one request: Azure's limit


@dataclass(frozen=True)
class CloudStore(BucketStore[CloudClient]):
    """A store of objects on Google Cloud Storage or Azure. See `BucketStore`."""

    _failure_types = FAILURES
    _single_upload_bytes = SINGLE_UPLOAD_BYTES
    _translate_error = staticmethod(translate_error)

    def entry(self, key: str) -> Entry | None:
        name = self._object_name(key)

        def request_metadata(client: CloudClient) -> Entry | None:
            stored = head_object(client, name)
            return None if stored is None else Entry(key, int(stored["size"]), stored["e_tag"] or "")

        return self._call_with_retries(name, request_metadata)

    def list(self, prefix: str = "") -> Iterator[Entry]:
        root = f"{self.prefix}/" if self.prefix else ""
        wanted = root + prefix
        patience = RetryLimit(self.patience_s)
        listing = CloudListing(wanted.rpartition("/")[0], ordered=self.scheme != "az", reached=patience.record_progress)
        while listing.more:
            for item in self._call_with_retries(listing.folder, listing.request_next_page, patience):
                name = str(item["path"])
                if name.startswith(wanted):
                    yield Entry(name.removeprefix(root), int(item["size"]), item["e_tag"] or "")
                elif name > wanted:  # names come in order, so no further name has the prefix
                    return
            patience = RetryLimit(self.patience_s)

    def folders(self) -> Iterator[str]:
        def list_prefixes(client: CloudClient) -> list[str]:
            found = obstore.list_with_delimiter(client.requests, prefix=self.prefix or None)
            return [name.rstrip("/").rpartition("/")[2] for name in found["common_prefixes"]]

        yield from sorted(self._call_with_retries(self.prefix, list_prefixes), key=lambda name: f"{name}/")

    def delete(self, key: str) -> None:
        name = self._object_name(key)
        with suppress(KeyMissing):  # Azure and Google raise this for a missing object; S3 does not
            self._call_with_retries(name, partial(_delete_objects, [name]))

    def delete_many(self, keys: Sequence[str]) -> None:
        """Delete the objects, up to 256 by one call of obstore, which on Azure is one request."""
        for start in range(0, len(keys), _MAX_DELETIONS):
            batch = keys[start : start + _MAX_DELETIONS]
            names = [self._object_name(key) for key in batch]
            try:
                self._call_with_retries(self.prefix, partial(_delete_objects, names))
            except KeyMissing:  # one object does not exist; the others may or may not be deleted
                for _ in parallel_map(self.delete, batch):
                    pass

    def clock(self) -> float | None:
        return self._call_with_retries(self.prefix, CloudClient.request_server_time, signed=False)

    def age(self, key: str) -> float | None:
        """Return the server's time minus the object's time of change.

        The server's time is requested first. If the object is replaced meanwhile, its age is too low, never too high.
        """
        name = self._object_name(key)

        def object_age_s(client: CloudClient) -> float | None:
            now = client.request_server_time()
            stored = head_object(client, name)
            return None if stored is None else max(0.0, now - float(stored["last_modified"].timestamp()))

        return self._call_with_retries(name, object_age_s)

    def remove_leftovers(self, folder: str, *, older_than_key: str | None) -> int:
        """Return 0: obstore does not list unfinished uploads.

        Azure deletes their parts after a week. Google keeps them until a lifecycle rule of the bucket
        (AbortIncompleteMultipartUpload) deletes them.
        """
        return 0

    def _download(self, key: str, start: int, length: int | None) -> bytes:
        name, patience = self._object_name(key), RetryLimit(self.patience_s)
        download = CloudDownload(name, self._object_uri(name), patience.record_progress, start, length)
        return self._call_with_retries(name, download.try_download, patience)

    def _create_object(self, name: str, body: bytes, writer: str, client: CloudClient) -> bool:
        written = {WRITER_FIELD: writer}
        try:
            obstore.put(client.requests, name, body, mode="create", use_multipart=False, attributes=written)
        except AlreadyExistsError:
            return False
        return True

    def _find_writer(self, name: str, client: CloudClient) -> str | None:
        try:
            found = obstore.get(client.requests, name, options={"head": True})
        except FileNotFoundError:
            return None
        return str(found.attributes.get(WRITER_FIELD, ""))

    def _put_object(self, name: str, body: bytes, client: CloudClient) -> object:
        return obstore.put(client.requests, name, body, use_multipart=False)

    def _put_in_parts(
        self,
        name: str,
        source: UploadSource,
        patience: RetryLimit,
        report_reached: Callable[[int], None],
    ) -> None:
        self._call_with_retries(name, partial(upload_in_parts, name, source, report_reached), patience)

    def _check_name(self, name: str, key: str) -> None:
        if "\\" in name or any(character < " " or character == "\x7f" for character in name):
            raise BadUri.for_uri(f"{self.uri}/{key}", "a key here cannot have a backslash or a control character")
        if self.scheme == "az" and any(part.endswith(".") for part in name.split("/")):
            raise BadUri.for_uri(f"{self.uri}/{key}", "Azure drops the dot at the end of a name")


def _delete_objects(names: Sequence[str], client: CloudClient) -> None:
    obstore.delete(client.requests, names)


def open_cloud(scheme: Scheme, bucket: str, prefix: str, patience_s: float) -> CloudStore:
    """Return the store of a bucket's objects below `prefix`. Nothing is contacted."""
    return CloudStore(bucket, prefix, patience_s, CloudConnection(scheme, bucket), scheme)
