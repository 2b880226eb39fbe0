"""Reads web archives: WET files of text, and the HTML pages in WARC files (by warcio and trafilatura).

A document is a `conversion` record, or a `response` of status 200 that holds HTML. Requests, metadata, redirects and
images are not documents. The fields `id`, `url`, `date` and `language` come from the record's headers.
A page is decoded as browsers do it (`web_encodings.py`); if nothing says its charset, trafilatura guesses it.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, BinaryIO

from data_service.errors import InputError
from data_service.ingest.files import open_decompressed
from data_service.ingest.formats import LINE_TO_DOCUMENT_RATIO
from data_service.ingest.inputs import InputFile, require_packages
from data_service.ingest.options import BuildOptions
from data_service.ingest.places import RecordPlace
from data_service.ingest.records import BadRecord, TextRecord, parse_document, too_long_record, try_read
from data_service.ingest.tasks import FilePiece
from data_service.ingest.web_encodings import decode_content, decode_html_page

_HEADER_BY_FIELD = {
    "id": "WARC-Record-ID",
    "url": "WARC-Target-URI",
    "date": "WARC-Date",
    "language": "WARC-Identified-Content-Language",
}
_REQUIRED_HEADERS = ("WARC-Type", "WARC-Record-ID", "Content-Length")
_RECORD_END = b"\r\n\r\n"  # last bytes of a WARC record
_IDENTITY_CODINGS = ("", "identity", "chunked")  # HTTP codings that need no decompression
_READABLE_PAGE_REMEDY = "fetch the page again, decoded or as gzip, and in UTF-8"
_HTML_TYPES = ("text/html", "application/xhtml+xml")


def read_warc(piece: FilePiece, options: BuildOptions) -> Iterator[TextRecord | BadRecord]:
    """Yield the documents of a whole archive.

    Raises:
        InputError: the archive is damaged or cut short, or a package is missing.
    """
    file = piece.file
    require_packages(file)
    with open_decompressed(file) as stream:
        for number, record in enumerate(_records(stream, file)):
            place = RecordPlace(file, "record", number)
            _check_record_headers(record, place)
            if _is_document(record):
                yield try_read(options, _parse_record, record, options, place)
            _check_record_length(record, place)


def _records(stream: BinaryIO, file: InputFile) -> Iterator[Any]:
    """Yield the archive's records, as warcio returns them. Raises InputError: it is damaged or cut short."""
    from warcio.archiveiterator import ArchiveIterator
    from warcio.exceptions import ArchiveLoadFailed

    tail = _TailStream(stream)
    records = ArchiveIterator(tail)
    number = 0
    while True:
        try:
            record = next(records, None)
        # warcio raises AttributeError and TypeError if the headers of a record end too early
        except (ArchiveLoadFailed, EOFError, ValueError, AttributeError, TypeError) as error:
            raise InputError(
                f"{file.uri}, record {number}: damaged or cut short: {error}",
                remedy="fetch the archive again; no document of it was used",
            ) from error
        # At truncated headers, warcio stops as at the end of the file.
        if record is None and tail.last != _RECORD_END:
            raise InputError(
                f"{file.uri}, record {number}: cut short, or not a web archive: the end of the last record is missing",
                remedy="fetch the archive again; no document of it was used",
            )
        if record is None:
            return
        yield record
        number += 1


class _TailStream:
    """A stream that remembers the last bytes that were read from it."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.last = b""

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self.last = (self.last + data[-len(_RECORD_END) :])[-len(_RECORD_END) :]
        return data


def _is_document(record: Any) -> bool:
    if record.rec_type == "conversion":
        return True
    if record.rec_type != "response" or record.http_headers is None:
        return False
    kind = (record.http_headers.get_header("Content-Type") or "").partition(";")[0].strip().lower()
    return record.http_headers.get_statuscode() == "200" and kind in _HTML_TYPES


def _parse_record(record: Any, options: BuildOptions, place: RecordPlace) -> TextRecord:
    most = options.max_document_bytes * LINE_TO_DOCUMENT_RATIO
    values: dict[str, object] = {
        name: record.rec_headers.get_header(header) for name, header in _HEADER_BY_FIELD.items()
    }
    page = record.rec_type == "response"
    try:
        data = _read_page(record, most) if page else record.raw_stream.read(most + 1)
        if len(data) > most:
            raise too_long_record(place, most)
        text = decode_html_page(data, record.http_headers.get_header("Content-Type")) if page else None
    except ValueError as error:
        raise BadRecord(place, f"the page cannot be read: {error}", _READABLE_PAGE_REMEDY) from error
    values[options.text_field] = _extract_text(text or data, values["url"]) if page else data
    found = parse_document(values, options, place)
    return replace(found, replaced=found.replaced or (page and "\ufffd" in found.text))


def _read_page(record: Any, max_bytes: int) -> bytes:
    """Return at most `max_bytes` + 1 bytes of a page, decoded from HTTP codings. Raises ValueError: one is unknown."""
    from warcio.bufferedreaders import ChunkedDataReader

    codings: list[str] = []
    for header in ("content-encoding", "transfer-encoding"):
        values = (value for name, value in record.http_headers.headers if name.lower() == header)
        codings += (name.strip().lower() for name in ",".join(values).split(","))
    stream = ChunkedDataReader(record.raw_stream) if "chunked" in codings else record.raw_stream
    return decode_content(
        stream.read(max_bytes + 1), [name for name in codings if name not in _IDENTITY_CODINGS], max_bytes
    )


def _extract_text(page: bytes | str, url: object) -> str:
    from trafilatura import extract

    return extract(page, url=str(url) if url else None) or ""


def _check_record_headers(record: Any, place: RecordPlace) -> None:
    """Raise InputError if a record lacks a header that every record must have."""
    if missing := [name for name in _REQUIRED_HEADERS if record.rec_headers.get_header(name) is None]:
        raise InputError(
            f"{place}: not a record of a web archive, or cut short: the header {missing[0]} is missing",
            remedy="fetch the archive again, or give the file the suffix of its format; no document of it was used",
        )


def _check_record_length(record: Any, place: RecordPlace) -> None:
    """Raise InputError if the file ends within the record."""
    while record.raw_stream.read(1 << 20):
        pass
    if getattr(record.raw_stream, "limit", 0) > 0:
        raise InputError(
            f"{place}: the archive is cut short: {record.raw_stream.limit:,} bytes of the record are missing",
            remedy="fetch the archive again; no document of it was used",
        )
