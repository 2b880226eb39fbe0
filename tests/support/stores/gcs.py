"""A fake of Google Cloud Storage's XML interface, in this process, as obstore uses it.

What it does as the service does: buckets, objects with generations, `x-goog-if-generation-match`, `If-Match`, ranges,
metadata, listings page by page in the order of the names' bytes, uploads in parts of 5 MiB at least, bearer tokens, the
codes of its errors.

What it fakes or leaves out: objects are in memory; a token is a word; there are no permissions, no resumable uploads,
no signed URLs, no checksums, no versions of old objects; a name may be written more often than once in a second, which
the service answers with 429. It was written from the documents of the interface and has never run beside the service.
"""

import hashlib
import os
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import format_datetime
from itertools import count
from typing import ClassVar
from urllib.parse import parse_qs, unquote, urlsplit
from uuid import uuid4
from xml.sax.saxutils import escape

import pytest

from tests.support.stores.fault_proxy import Errors
from tests.support.stores.http_server import LocalHandler, LocalServer
from tests.support.stores.service import Service

_PAGE = 1000
_LEAST_PART = 5 << 20
_META = "x-goog-meta-"
TOKEN = "ya29.test"


@dataclass(frozen=True)
class StoredObject:
    data: bytes
    generation: int
    metadata: dict[str, str]
    written: datetime

    @property
    def etag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'


@dataclass
class _Bucket:
    objects: dict[str, StoredObject] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)


class Refused(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, code: str) -> None:
        self.status, self.code = status, code


class FakeGcs(LocalServer, Service):
    """The server. `tokens`: the bearer tokens that it takes. `buckets`: what it holds. A context manager."""

    scheme: ClassVar[str] = "gs"
    variables: ClassVar[str] = "GOOGLE_"
    errors: ClassVar[Errors] = {
        "error 500": (500, "InternalError"),
        "slow down": (503, "ServiceUnavailable"),
        "expired token": (401, "AuthenticationRequired"),
        "unknown key": (401, "AuthenticationRequired"),
        "denied": (403, "AccessDenied"),
        "no such key": (404, "NoSuchKey"),
    }

    def __init__(self) -> None:
        self.tokens = {TOKEN}
        self.buckets: dict[str, _Bucket] = {}
        self.lock = threading.Lock()
        self.generations = count(1_700_000_000_000_000)
        super().__init__(_Handler)

    @property
    def environment(self) -> dict[str, str]:
        return {"GOOGLE_BASE_URL": self.endpoint, "GOOGLE_BEARER_TOKEN": TOKEN}

    def reach(self, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GOOGLE_BASE_URL", endpoint)

    def renew(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Gives this process another token, which the server takes, too."""
        self.tokens.add("renewed")
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "renewed")

    def forge(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "forged")

    def take_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Takes this process's token away, and the machine's service for others."""
        monkeypatch.delenv("GOOGLE_BEARER_TOKEN")
        monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
        monkeypatch.setenv("HOME", os.devnull)  # where gcloud leaves credentials

    def new_bucket(self, name: str = "") -> str:
        name = name or f"test-{uuid4().hex[:12]}"
        self.buckets[name] = _Bucket()
        return name

    def store(self, bucket: _Bucket, key: str, data: bytes, headers: dict[str, str]) -> StoredObject:
        """Put an object. Raises Refused: it has another generation than the header wants."""
        with self.lock:
            wanted = headers.get("x-goog-if-generation-match")
            before = bucket.objects.get(key)
            if wanted is not None and int(wanted) != (before.generation if before else 0):
                raise Refused(412, "PreconditionFailed")
            metadata = {name: value for name, value in headers.items() if name.startswith(_META)}
            made = StoredObject(data, next(self.generations), metadata, datetime.now(UTC))
            bucket.objects[key] = made
            return made


def _page(bucket: _Bucket, query: dict[str, str]) -> Iterator[str]:
    """The XML of one page of a listing, ListObjectsV2 of the XML interface."""
    prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
    after = query.get("continuation-token") or query.get("start-after", "")
    room = min(_PAGE, int(query.get("max-keys", _PAGE)))
    lines: list[str] = []
    last, more = "", False
    folders: set[str] = set()
    for key in sorted(bucket.objects, key=str.encode):
        end = key.find(delimiter, len(prefix)) if delimiter else -1
        folder = key[: end + 1] if end >= 0 else ""
        if not key.startswith(prefix) or key <= after or (folder and folder <= after) or folder in folders - {""}:
            continue
        if len(lines) == room:
            more = True
            break
        last = folder or key
        if folder:
            folders.add(folder)
            lines.append(f"<CommonPrefixes><Prefix>{escape(folder)}</Prefix></CommonPrefixes>")
            continue
        one = bucket.objects[key]
        lines.append(
            f"<Contents><Key>{escape(key)}</Key><Generation>{one.generation}</Generation>"
            f"<LastModified>{one.written.isoformat(timespec='milliseconds').replace('+00:00', 'Z')}</LastModified>"
            f"<ETag>{escape(one.etag)}</ETag><Size>{len(one.data)}</Size></Contents>"
        )
    yield '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult>'
    yield f"<Prefix>{escape(prefix)}</Prefix><IsTruncated>{str(more).lower()}</IsTruncated>"
    if more:
        yield f"<NextContinuationToken>{escape(last)}</NextContinuationToken>"
    yield from lines
    yield "</ListBucketResult>"


class _Handler(LocalHandler):
    server_state: FakeGcs

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = urlsplit(self.path)
        name, _, key = unquote(path.path).removeprefix("/").partition("/")
        query = {k: v[0] for k, v in parse_qs(path.query, keep_blank_values=True).items()}
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            if headers.get("authorization", "").removeprefix("Bearer ") not in self.server_state.tokens:
                raise Refused(401, "AuthenticationRequired")
            bucket = self.server_state.buckets.get(name)
            if bucket is None:
                raise Refused(404, "NoSuchBucket")
            if key:
                self._object(bucket, key, query, headers, body)
            else:
                self.send_answer(200, "".join(_page(bucket, query)).encode())
        except Refused as refused:
            said = f"<?xml version='1.0'?><Error><Code>{refused.code}</Code><Message>fake</Message></Error>"
            self.send_answer(refused.status, said.encode())

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _serve

    def _object(self, bucket: _Bucket, key: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> None:
        if "uploads" in query or "uploadId" in query:
            return self._upload(bucket, key, query, headers, body)
        if self.command == "PUT":
            made = self.server_state.store(bucket, key, body, headers)
            return self.send_answer(200, b"", {"ETag": made.etag, "x-goog-generation": str(made.generation)})
        stored = bucket.objects.get(key)
        if stored is None:
            raise Refused(404, "NoSuchKey")
        if self.command == "DELETE":
            bucket.objects.pop(key, None)
            return self.send_answer(204, b"")
        self._read(stored, headers)

    def _read(self, stored: StoredObject, headers: dict[str, str]) -> None:
        if headers.get("if-match", stored.etag) != stored.etag:
            raise Refused(412, "PreconditionFailed")
        size, status, data = len(stored.data), 200, stored.data
        told = {
            "ETag": stored.etag,
            "x-goog-generation": str(stored.generation),
            "Last-Modified": format_datetime(stored.written, usegmt=True),
            "Content-Type": "application/octet-stream",
            **stored.metadata,
        }
        if wanted := headers.get("range"):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            if int(first) >= size:
                raise Refused(416, "InvalidRange")
            stop = min(size, int(last) + 1) if last else size
            status, data = 206, data[int(first) : stop]
            told["Content-Range"] = f"bytes {first}-{stop - 1}/{size}"
        self.send_answer(status, data, told)

    def _upload(self, bucket: _Bucket, key: str, query: dict[str, str], headers: dict[str, str], body: bytes) -> None:
        if "uploads" in query:
            number = uuid4().hex
            bucket.uploads[number] = {}
            inner = f"<Bucket>b</Bucket><Key>{escape(key)}</Key><UploadId>{number}</UploadId>"
            said = f"<InitiateMultipartUploadResult>{inner}</InitiateMultipartUploadResult>"
            return self.send_answer(200, said.encode())
        parts = bucket.uploads.get(query["uploadId"])
        if parts is None:
            raise Refused(404, "NoSuchUpload")
        if self.command == "PUT":
            parts[int(query["partNumber"])] = body
            return self.send_answer(200, b"", {"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        if self.command == "DELETE":
            del bucket.uploads[query["uploadId"]]
            return self.send_answer(204, b"")
        made = self.server_state.store(bucket, key, _joined(parts, body), headers)
        bucket.uploads.pop(query["uploadId"], None)
        said = f"<CompleteMultipartUploadResult><ETag>{escape(made.etag)}</ETag></CompleteMultipartUploadResult>"
        self.send_answer(200, said.encode(), {"x-goog-generation": str(made.generation)})


def _joined(parts: dict[int, bytes], request: bytes) -> bytes:
    """The parts that a request names. Raises Refused: one is unknown, or too small."""
    wanted = [(int(part.findtext("PartNumber", "0")), part.findtext("ETag")) for part in ET.fromstring(request)]
    for number, etag in wanted:
        if number not in parts or etag != f'"{hashlib.md5(parts[number]).hexdigest()}"':
            raise Refused(400, "InvalidPart")
    if any(len(parts[number]) < _LEAST_PART for number, _ in wanted[:-1]):
        raise Refused(400, "EntityTooSmall")
    return b"".join(parts[number] for number, _ in wanted)
