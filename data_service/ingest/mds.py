"""Reads shards of MosaicML Streaming (MDS): a sample is a document.

A shard consists of the number of samples N (uint32), N + 1 offsets (uint32), a description as JSON, and the samples. A
sample consists of the sizes (uint32) of its variable-size columns, and the columns in the order of the description.
Numbers are little-endian. This is version 2 of the format. Only columns of texts and numbers are read, never pickles. A
folder's `index.json` is checked when the files are listed (`mds_index.py`).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from data_service.errors import InputError
from data_service.ingest.files import open_decompressed
from data_service.ingest.formats import LINE_TO_DOCUMENT_RATIO
from data_service.ingest.inputs import InputFile
from data_service.ingest.json_values import parse_json_value
from data_service.ingest.options import BuildOptions
from data_service.ingest.places import RecordPlace
from data_service.ingest.records import BadRecord, TextRecord, parse_record, skip_or_refuse, too_long_record, try_read
from data_service.ingest.tasks import FilePiece

_MAX_DESCRIPTION_BYTES = 1 << 20  # longest JSON description of a shard that is accepted
_READ_CHUNK_BYTES = 1 << 20
_TEXT_ENCODINGS = ("str", "str_int", "str_float", "str_decimal", "bytes", "json")  # MDS encodings of texts
_NUMBER_DTYPES = {"int": "int64"} | {  # numpy's dtype of each MDS encoding of numbers
    name: name
    for name in (
        *("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
        *("float16", "float32", "float64"),
    )
}
_REFETCH_REMEDY = "fetch or write the data set again; no document of it was used"


class _ShardDescription(BaseModel):
    """The JSON description of a shard's samples; other entries are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    version: int
    format: str
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]


@dataclass(frozen=True)
class _ShardHeader:
    """The offsets [N + 1] of a shard's samples, and the shard's columns."""

    offsets: NDArray[np.int64]
    columns: tuple[tuple[str, str, int | None], ...]  # name, encoding, bytes (None: varies)


def read_mds(piece: FilePiece, options: BuildOptions) -> Iterator[TextRecord | BadRecord]:
    """Yield the documents of a whole shard.

    Raises:
        InputError: the shard is damaged, or a column is missing or holds neither texts nor numbers.
    """
    file, most = piece.file, options.max_document_bytes * LINE_TO_DOCUMENT_RATIO
    with open_decompressed(file) as stream:
        shard = _read_shard_header(stream, file)
        wanted = _select_columns(shard, file, options)
        for row in range(len(shard.offsets) - 1):
            size, place = int(shard.offsets[row + 1] - shard.offsets[row]), RecordPlace(file, "row", row)
            if size > most:
                _read_exactly(stream, size, place, kept=False)
                yield skip_or_refuse(options, too_long_record(place, most))
                continue
            values = _parse_sample(_read_exactly(stream, size, place), shard, wanted, place)
            yield try_read(options, parse_record, values, options, place)
        if stream.read(1):
            raise _damaged_shard_error(RecordPlace(file), "bytes follow the last sample")


def _read_shard_header(stream: BinaryIO, file: InputFile) -> _ShardHeader:
    place = RecordPlace(file)
    count = int.from_bytes(_read_exactly(stream, 4, place), "little")
    raw = _read_exactly(stream, 4 * (count + 1), place)
    offsets: NDArray[np.int64] = np.frombuffer(raw, dtype="<u4").astype(np.int64)
    begins = 4 * (count + 2)
    if np.any(np.diff(offsets) < 0) or not 0 < offsets[0] - begins <= _MAX_DESCRIPTION_BYTES:
        raise _damaged_shard_error(place, "its offsets are not ascending, or its description is missing or too long")
    if not file.compression and offsets[-1] != file.size:
        raise _damaged_shard_error(place, f"it has {file.size:,} bytes, but its offsets end at {offsets[-1]:,}")
    try:
        found = _ShardDescription.model_validate_json(_read_exactly(stream, int(offsets[0] - begins), place))
        columns = zip(found.column_names, found.column_encodings, found.column_sizes, strict=True)
        shard = _ShardHeader(offsets, tuple(columns))
    except (ValidationError, ValueError) as error:
        raise _damaged_shard_error(place, f"it does not describe its samples: {error}") from error
    if found.format != "mds" or found.version != 2:
        raise InputError(
            f"{file.uri}: the shard has format {found.format} {found.version}, but only mds 2 can be read",
            remedy="write the data set again with a current version of mosaicml-streaming",
        )
    return shard


def _select_columns(shard: _ShardHeader, file: InputFile, options: BuildOptions) -> dict[int, str]:
    """Return the names of the columns to read, by column number. Raises InputError: a column cannot be read."""
    names = [name for name, _, _ in shard.columns]
    wanted: dict[int, str] = {}
    for name in dict.fromkeys((*options.required_fields, *options.optional_fields)):
        if name not in names and name in options.optional_fields:
            continue
        encoding = shard.columns[names.index(name)][1] if names.count(name) == 1 else None
        if encoding not in (*_TEXT_ENCODINGS, *_NUMBER_DTYPES):
            held = f"is encoded as {encoding}" if encoding else "is missing"
            known = ", ".join(f"{name} ({kind})" for name, kind, _ in shard.columns)
            raise InputError(
                f"{file.uri}: column {name!r} {held}; the columns are {known}",
                remedy="name a column of texts or numbers with --text-field, or under `text` and `fields`",
            )
        wanted[names.index(name)] = name
    return wanted


def _parse_sample(
    raw: bytes, shard: _ShardHeader, wanted_columns: Mapping[int, str], place: RecordPlace
) -> dict[str, object]:
    """Return the values of a sample's wanted columns, by name."""
    varying = sum(size is None for _, _, size in shard.columns)
    if len(raw) < 4 * varying:
        raise _damaged_shard_error(place, "the sample is too short for the sizes of its columns")
    sizes = iter(np.frombuffer(raw[: 4 * varying], dtype="<u4").tolist())
    at, values = 4 * varying, dict[str, object]()
    for number, (_, encoding, fixed) in enumerate(shard.columns):
        size = next(sizes) if fixed is None else fixed
        if number in wanted_columns:
            values[wanted_columns[number]] = _parse_value(raw[at : at + size], encoding, place)
        at += size
    if at != len(raw):
        raise _damaged_shard_error(place, "its columns together are not as long as the sample")
    return values


def _parse_value(raw: bytes, encoding: str, place: RecordPlace) -> object:
    if encoding in _NUMBER_DTYPES:
        kind = np.dtype(_NUMBER_DTYPES[encoding]).newbyteorder("<")
        if len(raw) != kind.itemsize:
            raise _damaged_shard_error(place, f"a number has {len(raw)} bytes, but {encoding} has {kind.itemsize}")
        return np.frombuffer(raw, dtype=kind)[0].item()
    if encoding != "json":
        return raw
    try:
        return parse_json_value(raw)
    except (ValueError, RecursionError) as error:
        raise _damaged_shard_error(place, f"a column is not JSON: {error}") from error


def _read_exactly(stream: BinaryIO, size: int, place: RecordPlace, *, kept: bool = True) -> bytes:
    """Read `size` bytes; return them if `kept`. Memory grows only with the bytes that are there."""
    parts: list[bytes] = []
    while size and (data := stream.read(min(size, _READ_CHUNK_BYTES))):
        size -= len(data)
        if kept:
            parts.append(data)
    if size:
        raise _damaged_shard_error(place, f"it is cut short: {size:,} bytes are missing")
    return b"".join(parts)


def _damaged_shard_error(place: RecordPlace, reason: str) -> InputError:
    return InputError(f"{place}: not a shard of MosaicML Streaming, or a damaged one: {reason}", remedy=_REFETCH_REMEDY)
