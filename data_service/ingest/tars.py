"""Reads tar archives of text and JSON files, compressed or not, and archives in archives, such as OpenWebText's.

Members are never written to disk, so their names cannot do harm. Headers are parsed one after another, so memory does
not grow with the number of members. The format is POSIX.1-2001's ustar and pax, with GNU's long names.
Hidden members (`hidden_file`), other kinds of files (`no_text_file`), objects in `.json` without the text field
(`no_text_field`) and links or devices (`no_file`) are not documents; they are counted.
"""

import io
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import BinaryIO, cast

from data_service.errors import InputError
from data_service.ingest.encodings import ReadableStream
from data_service.ingest.file_kinds import HIDDEN_PATH, Compression, Format, kind_from_name
from data_service.ingest.files import decompress, open_decompressed, to_utf8_stream
from data_service.ingest.formats import (
    LINE_TO_DOCUMENT_RATIO,
    InputLine,
    parse_json_line,
    parse_txt_document,
    read_lines,
    split_at_blank_lines,
)
from data_service.ingest.inputs import InputFile
from data_service.ingest.json_values import parse_json_value
from data_service.ingest.options import BuildOptions
from data_service.ingest.places import RecordPlace
from data_service.ingest.records import (
    BadRecord,
    TextRecord,
    flatten_named_fields,
    non_document_record,
    skip_or_refuse,
    too_long_record,
    try_read,
)
from data_service.ingest.tasks import FilePiece

BLOCK_BYTES = tarfile.BLOCKSIZE  # 512; headers and contents are padded to whole blocks of a tar
_MAX_HEADER_BYTES = 1 << 20  # largest extended header that is accepted
_MAX_NESTING = 3  # greatest depth of archives in archives
_READ_CHUNK_BYTES = 1 << 20
_EXTENDED_HEADER_TYPES = (  # headers that describe the member after them
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
)
_TYPES_WITHOUT_CONTENT = (
    *(tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE),
    *(tarfile.BLKTYPE, tarfile.DIRTYPE, tarfile.FIFOTYPE),
)
_SPARSE_HEADER_FLAG, _SPARSE_BLOCK_FLAG = 482, 504  # offsets of the flag that a sparse file's map goes on
_MAX_NUMBER_DIGITS = 19  # digits of a length or size in an extended header
_LONG_HEADER_REASON = "an extended header is too long or cut short"
_REFETCH_REMEDY = "fetch or write the archive again; no document of it was used"


@dataclass(frozen=True, slots=True)
class TarMember:
    """The header of an archive's member.

    Attributes:
        name: its name; bytes that are not UTF-8 are escaped.
        size: bytes of its content.
        kind: `file`, `folder` or `other`: links, devices, files with holes, lists of folders in incremental archives.
        raw: the header as it is stored, with the extended headers before it.
    """

    name: str
    size: int
    kind: str
    raw: bytes

    @property
    def padded_size(self) -> int:
        """Bytes of the content as stored, padded to whole blocks."""
        return -(-self.size // BLOCK_BYTES) * BLOCK_BYTES


# The header, the byte at which it begins, and the content; None if the stream does not hold the content.
_Member = tuple[TarMember, int, BinaryIO | None]


def max_member_bytes(options: BuildOptions) -> int:
    """Return the size in bytes of the largest members whose content is read."""
    return options.max_document_bytes * LINE_TO_DOCUMENT_RATIO


def read_tar(piece: FilePiece, options: BuildOptions) -> Iterator[TextRecord | BadRecord]:
    """Yield the texts of the members that begin in the piece.

    Raises:
        InputError: the archive, or one in it, is damaged or cut short.
    """
    file = piece.file
    if piece.text is not None:
        held = max_member_bytes(options)
        members = _split_members(file, io.BytesIO(piece.text), piece.text_start, max_held_bytes=held)
        yield from _read_members(file, members, options, 0)
        return
    with open_decompressed(file) as stream:
        yield from _read_members(file, _split_members(file, stream), options, 0)


def _split_members(
    file: InputFile, stream: BinaryIO, position: int = 0, *, max_held_bytes: int | None = None
) -> Iterator[_Member]:
    """Yield the members of a tar stream, whose first byte has offset `position`. Each content must be read before the
    next member.

    `max_held_bytes`: size of the largest members whose content the stream holds; None if it holds all.
    """
    while True:
        skipped, member = read_header(stream, file, position)
        if member is None and max_held_bytes is None and not skipped:
            raise truncated_archive_error(file)
        if member is None:
            return
        begins = position + skipped
        position = begins + len(member.raw) + member.padded_size
        if max_held_bytes is not None and member.size > max_held_bytes:
            yield member, begins, None
            continue
        content = _MemberStream(stream, file, member)
        yield member, begins, cast(BinaryIO, io.BufferedReader(content, buffer_size=BLOCK_BYTES))
        content.skip_rest()


def read_header(stream: BinaryIO, file: InputFile, position: int) -> tuple[int, TarMember | None]:
    """Return the number of bytes of empty blocks, and the member after them; None at the end of the stream.

    Empty blocks end an archive, but another archive may follow and is read, too. `position`: offset for messages.

    Raises:
        InputError: the next block is not a header, or is cut short.
    """
    skipped, raw, known = 0, b"", dict[str, str]()
    while True:
        block = stream.read(BLOCK_BYTES)
        if not block and not raw:
            return skipped, None
        if not raw and len(block) == BLOCK_BYTES and not block.strip(b"\0"):
            skipped += BLOCK_BYTES
            continue
        try:
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        except tarfile.HeaderError as error:
            raise _damaged_archive_error(file, position + skipped + len(raw), str(error)) from error
        raw += block
        if info.type == tarfile.GNUTYPE_SPARSE:
            raw += _sparse_map_blocks(stream, file, block, position + skipped + len(raw))
        if info.type not in _EXTENDED_HEADER_TYPES:
            return skipped, _parse_member(info, known, raw)
        payload = _read_extended_header(stream, file, info, position + skipped + len(raw))
        raw += payload
        known |= _parse_extended_header(info, payload[: info.size])


def _read_extended_header(stream: BinaryIO, file: InputFile, info: tarfile.TarInfo, position: int) -> bytes:
    size = -(-info.size // BLOCK_BYTES) * BLOCK_BYTES
    payload = stream.read(size) if 0 <= info.size <= _MAX_HEADER_BYTES else b""
    if len(payload) < size or info.size < 0:
        raise _damaged_archive_error(file, position, _LONG_HEADER_REASON)
    return payload


def _sparse_map_blocks(stream: BinaryIO, file: InputFile, header: bytes, position: int) -> bytes:
    """Return the blocks between the header and the content of a GNU sparse file. They continue the header's map of
    the stored ranges; each says whether another follows."""
    blocks, more = bytearray(), header[_SPARSE_HEADER_FLAG]
    while more:
        block = stream.read(BLOCK_BYTES)
        if len(block) < BLOCK_BYTES or len(blocks) >= _MAX_HEADER_BYTES:
            raise _damaged_archive_error(file, position, _LONG_HEADER_REASON)
        blocks += block
        more = block[_SPARSE_BLOCK_FLAG]
    return bytes(blocks)


def _parse_extended_header(info: tarfile.TarInfo, payload: bytes) -> dict[str, str]:
    """Return the fields of an extended header, which describe the next member."""
    if info.type == tarfile.GNUTYPE_LONGNAME:
        return {"path": payload.rstrip(b"\0").decode("utf-8", "surrogateescape")}
    known: dict[str, str] = {}
    while info.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE) and payload:
        length, _, _ = payload.partition(b" ")
        if not length.isdigit() or len(length) > _MAX_NUMBER_DIGITS or not 0 < int(length) <= len(payload):
            break
        record, payload = payload[len(length) + 1 : int(length)], payload[int(length) :]
        name, _, value = record.rstrip(b"\n").partition(b"=")
        known[name.decode(errors="replace")] = value.decode("utf-8", "surrogateescape")
    return known


def _parse_member(info: tarfile.TarInfo, known: dict[str, str], raw: bytes) -> TarMember:
    name = known.get("path", info.name)
    stated = known.get("size", "")
    size = int(stated) if stated.isdecimal() and len(stated) <= _MAX_NUMBER_DIGITS else info.size
    holes = info.type == tarfile.GNUTYPE_SPARSE or any(key.startswith("GNU.sparse") for key in known)
    kind = "folder" if info.isdir() else "file" if info.isreg() and not holes else "other"
    if info.type in _TYPES_WITHOUT_CONTENT:
        size = 0  # a link may state its target's size, but has no content; members of unknown types may
    shown = name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace").removeprefix("./")
    return TarMember(shown, max(0, size), kind, raw)


class _MemberStream(ReadableStream):
    """The content of a member, read from the stream of its archive."""

    def __init__(self, stream: BinaryIO, file: InputFile, member: TarMember) -> None:
        self._stream, self._file, self._member = stream, file, member
        self._left, self._padding = member.size, member.padded_size - member.size

    def read_some(self, size: int) -> bytes:
        data = self._stream.read(min(size, self._left))
        if not data and self._left and size:
            raise InputError(
                f"{self._file.uri}/{self._member.name}: the archive is cut short: {self._left:,} bytes are missing",
                remedy=_REFETCH_REMEDY,
            )
        self._left -= len(data)
        return data

    def skip_rest(self) -> None:
        """Skip the rest of the content and its padding."""
        while self._left:
            self.read_some(_READ_CHUNK_BYTES)
        self._stream.read(self._padding)


def _read_members(
    archive: InputFile, members: Iterator[_Member], options: BuildOptions, depth: int
) -> Iterator[TextRecord | BadRecord]:
    """Yield the documents of an archive's members. `depth`: number of archives that enclose the archive."""
    for member, begins, content in members:
        if member.kind == "folder":
            continue
        file = replace(archive, key=f"{archive.key}/{member.name}", size=member.size, version="", inside=True)
        place = RecordPlace(file, "byte", begins)
        kind, hidden = _member_kind(member.name), HIDDEN_PATH.match(member.name)
        if member.kind != "file" or hidden or kind is None:
            reason = "no_file" if member.kind != "file" else "hidden_file" if hidden else "no_text_file"
            yield non_document_record(reason, {}, options, place)
        elif content is None or member.size > max_member_bytes(options):
            yield skip_or_refuse(options, too_long_record(place, max_member_bytes(options)))
        else:
            inner = replace(file, format=kind[0], compression=kind[1])
            yield from _read_member(inner, begins, content, options, depth)


def _member_kind(name: str) -> tuple[Format, Compression] | None:
    """Return format and compression of a member that is read: text, JSON or an archive; None for others."""
    found = kind_from_name(name)
    if found is not None and found[0] in ("txt", "tar", "jsonl"):
        return found
    # OpenWebText's archives are called `..._data.xz`.
    return ("tar", "xz") if name.lower().endswith("_data.xz") else None


def _read_member(
    file: InputFile, begins: int, content: BinaryIO, options: BuildOptions, depth: int
) -> Iterator[TextRecord | BadRecord]:
    if file.format == "tar":
        if depth == _MAX_NESTING:
            raise InputError(f"{file.uri}: archives in archives, more than {_MAX_NESTING} deep", remedy="unpack them")
        yield from _read_members(file, _split_members(file, decompress(content, file)), options, depth + 1)
        return
    limit = options.max_document_bytes
    text = to_utf8_stream(decompress(content, file), file.encoding)
    place = RecordPlace(file, "byte", begins)
    if file.format == "jsonl":
        yield from _read_json_member(text, place, options)
        return
    refuse_named_fields(file, options)
    if options.txt_documents == "file":
        yield try_read(options, parse_txt_document, text.read(limit + 1), 0, place, options)
        return
    for first, data in split_at_blank_lines(read_lines(text, 0, limit), limit):
        yield try_read(options, parse_txt_document, data, first, replace(place, number=begins + first), options)


def refuse_named_fields(file: InputFile, options: BuildOptions) -> None:
    """Raise InputError if the options name fields, because a text file has none."""
    if options.pairs is not None or options.word_fields or options.metadata_fields:
        need = (
            "pairs need a query and a positive"
            if options.pairs is not None
            else f"field {(options.word_fields or options.metadata_fields or ())[0]!r} is to be read"
        )
        raise InputError(
            f"{file.uri}: a text file has no fields, but {need}",
            remedy="give JSON lines, CSV, TSV, Parquet or Arrow",
        )


def _read_json_member(text: BinaryIO, place: RecordPlace, options: BuildOptions) -> Iterator[TextRecord | BadRecord]:
    """Yield the documents of a JSON member: one value per line, or a single value, as in webdataset."""
    most = max_member_bytes(options)
    whole = text.read(most + 1)
    value = _parse_whole_json(place.file, whole)
    if len(whole) > most:
        yield skip_or_refuse(options, too_long_record(place, most))
    elif isinstance(value, dict) and options.required_fields[0] not in flatten_named_fields(value, options):
        yield non_document_record("no_text_field", {}, options, place)
    else:
        lines = read_lines(io.BytesIO(whole), 0, most) if value is None else [InputLine(0, whole)]
        for line in lines:
            if not line.data.isspace():
                at = replace(place, number=place.number + line.offset)
                yield try_read(options, parse_json_line, line, at, options)


def _parse_whole_json(file: InputFile, whole: bytes) -> object:
    """Return the value of a `.json` member that is a single JSON value; None for any other member."""
    if file.key.lower().removesuffix(f".{file.compression}").endswith(".json"):
        with suppress(ValueError, RecursionError):
            return parse_json_value(whole)
    return None


def truncated_archive_error(file: InputFile) -> InputError:
    """Return the error for an archive that ends too early."""
    return InputError(
        f"{file.uri}: the archive is cut short: it does not end with an empty block", remedy=_REFETCH_REMEDY
    )


def _damaged_archive_error(file: InputFile, position: int, reason: str) -> InputError:
    return InputError(
        f"{file.uri}: not a tar archive, or damaged or cut short at byte {position:,}: {reason}",
        remedy=_REFETCH_REMEDY,
    )
