"""Requests through obstore. After a failure a read continues with the missing bytes and a listing with the next page;
a large upload starts again.

Each call makes one attempt. Reads and listings remember their progress; `CloudStore` repeats the attempts.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import obstore
from obstore.exceptions import PreconditionError

from data_service.store.cloud_client import CloudClient
from data_service.store.cloud_errors import FAILURES, CloudFailure, is_beyond_end
from data_service.store.errors import Truncated
from data_service.store.upload_sources import UploadSource

_READ_BYTES = 4 << 20  # least number of bytes per read
# Bytes of a part of an upload: half of S3's size, because progress is only seen when a part is complete.
_PART_BYTES = 8 << 20
SINGLE_UPLOAD_BYTES = 2 * _PART_BYTES  # larger objects are uploaded in parts
_MAX_PARTS = 10_000  # most parts of an upload; Azure allows 50,000
_CONCURRENT_PARTS = 4  # parts uploaded at the same time
_PAGE_ENTRIES = 1000  # entries in a page of a listing


def head_object(client: CloudClient, name: str) -> Any | None:
    """Return obstore's metadata of an object, which include the size and the ETag; None if it does not exist.

    If the server refuses the HEAD request, a GET request is made: only its answer states a reason.

    Raises FAILURES.
    """
    try:
        return obstore.head(client.requests, name)
    except FileNotFoundError:
        return None
    except FAILURES as error:
        if CloudFailure.from_error(error).status not in (400, 401, 403):
            raise
        refused = error
    try:
        obstore.get_range(client.requests, name, start=0, length=1)
    except FAILURES as error:
        if not is_beyond_end(error):  # beyond the end: the object is readable but empty
            raise
    raise ConnectionError(f"{refused}, although a GET request is allowed") from refused


@dataclass
class CloudDownload:
    """A read of an object, or of `length` bytes of it from byte `start`.

    `uri`: URI of the object, for messages. `reached`: a function that is called with the number of bytes received so
    far.
    """

    name: str
    uri: str
    reached: Callable[[int], object]
    start: int = 0
    length: int | None = None
    _version: str | None = None  # ETag of the object, from the first answer
    _pieces: list[bytes] = field(default_factory=list)
    _here: int = 0  # number of bytes received so far

    def try_download(self, client: CloudClient) -> bytes:
        """Return all requested bytes.

        Raises:
            Truncated: the object ends before the last requested byte.
            FAILURES: obstore's errors. The next attempt continues where this one failed.
        """
        answer = self._request_body(client)
        expected = self._expected_bytes(answer)
        if self._here < expected:
            for piece in answer.stream(min_chunk_size=_READ_BYTES):
                self._pieces.append(bytes(piece))
                self._here += len(self._pieces[-1])
                self.reached(self._here)
        if self._here != expected:
            here = self._here
            self._discard_read_bytes()
            raise ValueError(f"the answer's body has {here} of {expected} bytes")
        return self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)

    def _request_body(self, client: CloudClient) -> Any:
        first = self.start + self._here
        options: dict[str, Any] = {} if self._version is None else {"if_match": self._version}
        if self.length is not None:
            options["range"] = (first, self.start + self.length)
        elif first:
            options["range"] = {"offset": first}
        try:
            return obstore.get(client.requests, self.name, options=options)
        except PreconditionError as error:
            raise self._object_changed_error() from error
        except FAILURES as error:
            if not is_beyond_end(error):
                raise
            stored = head_object(client, self.name)
            if self._here or stored is None:
                raise self._object_changed_error() from error
            raise self._truncated_error(int(stored["size"])) from error

    def _expected_bytes(self, answer: Any) -> int:
        """Return how many bytes to read in all. Raises ValueError: the answer has other bytes; Truncated: too few."""
        total, version = int(answer.meta["size"]), answer.meta["e_tag"]
        if self._version not in (None, version) or answer.range[0] != self.start + self._here:
            raise self._object_changed_error()
        self._version = version
        if self.length is not None and total < self.start + self.length:
            raise self._truncated_error(total)
        return total if self.length is None else self.length

    def _discard_read_bytes(self) -> None:
        self._version, self._here = None, 0
        self._pieces.clear()

    def _object_changed_error(self) -> ValueError:
        """Discard the bytes read so far, so that the next attempt starts again; return the error to raise."""
        self._discard_read_bytes()
        return ValueError(
            "the answer holds other bytes than were requested, or the object was replaced while it was read"
        )

    def _truncated_error(self, size: int) -> Truncated:
        return Truncated.for_uri(self.uri, self.start, self.length or 0, size)


def upload_in_parts(
    name: str, source: UploadSource, report_reached: Callable[[int], None], client: CloudClient
) -> None:
    """Send all parts of an object and complete the upload. `report_reached` is called with a number of bytes that the
    server has received; it may have received more.

    Raises FAILURES; the parts on the server are then deleted.
    """
    size = max(_PART_BYTES, -(-source.size // _MAX_PARTS))

    def iter_parts() -> Iterator[bytes]:
        # When obstore asks for another part, at most `_CONCURRENT_PARTS` earlier parts are still being sent.
        for number, start in enumerate(range(0, source.size, size), start=1):
            yield source.read(start, size)
            if number > _CONCURRENT_PARTS:
                report_reached((number - _CONCURRENT_PARTS) * size)

    options = {"use_multipart": True, "chunk_size": size, "max_concurrency": _CONCURRENT_PARTS}
    obstore.put(client.uploads, name, iter_parts(), **options)
    report_reached(source.size)


@dataclass
class CloudListing:
    """A listing in key order of the objects below the folder `folder` ("" for all), page by page.

    `ordered`: whether the service lists names in order. If not, all objects come in a single, sorted page; meanwhile
    `reached` is called with the number of objects found so far. `more`: whether further pages follow.
    """

    folder: str
    ordered: bool
    reached: Callable[[int], object]
    more: bool = True
    _after: str = ""  # name of the last object listed so far
    _stream: Any = None  # obstore's iterator of the following pages

    def request_next_page(self, client: CloudClient) -> list[Any]:
        """Return obstore's metadata of the next objects. Raises FAILURES; ValueError: the page is out of order."""
        return self._next_page(client) if self.ordered else self._all_objects(client)

    def _all_objects(self, client: CloudClient) -> list[Any]:
        found: list[Any] = []
        for page in self._begin_listing(client):
            found += page
            self.reached(len(found))
        self.more = False
        return sorted(found, key=lambda entry: str(entry["path"]))

    def _next_page(self, client: CloudClient) -> list[Any]:
        if self._stream is None:
            self._stream = self._begin_listing(client)
        # The stream stays None if `next` raises, so that the next attempt begins a new listing.
        stream, self._stream = self._stream, None
        page = next(stream, None)
        if page is None:
            self.more = False
            return []
        names = [self._after, *(str(entry["path"]) for entry in page)]
        if any(one >= following for one, following in pairwise(names)):
            raise ValueError("a page of the listing repeats names of an earlier page, or is not in order")
        self._after, self._stream = names[-1], stream
        return list(page)

    def _begin_listing(self, client: CloudClient) -> Any:
        return iter(
            obstore.list(
                client.requests,
                prefix=self.folder or None,
                offset=self._after or None,
                chunk_size=_PAGE_ENTRIES,
            )
        )
