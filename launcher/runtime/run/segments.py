"""The stored objects that hold a run's records: numbered segments of each attempt, and packs of many segments.

    metrics/a000002/00000007.jsonl             segment 7 of attempt 2: JSON lines
    metrics/a000002/00000000-00000511.parquet  pack of segments 0 to 511 of attempt 2

A segment's bytes never change, and only its own attempt writes it. A segment that is stored both by itself and in a
pack is read once, from the pack.

A pack is a Parquet file with a row for each line of its segments, even damaged lines. Each field of the step records is
a column, so that it can be read alone, without parsing JSON. pyarrow takes 36 MB of memory, so it is imported only
where a pack is written or read.

    in-segment               number of the segment that holds the line
    step-line, other-line    bytes of the line, in one of the two: that of step records or of other lines; else null
    <field>                  float64: this field of the step record; null if it is not a number
    metadata "maskfleet"     sealed JSON: {"format": 1, "lines": number of lines, "fields": [names of the fields]}
"""

import io
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from checkpoints.layout import add_digest, strip_digest
from data_service.formats import NEWER_REMEDY, has_newer_format, newer_version_message
from data_service.store.base import Store, parallel_map
from data_service.store.errors import KeyMissing
from launcher.errors import RunError
from launcher.runtime.run.step_table import Floats, Ints, StepTable, TableBuilder

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

METRICS = "metrics"  # folder of the records of steps and evaluations in a run's store
EVENTS = "events"  # folder of the records of events
PACK_SUFFIX = ".parquet"
"""Suffix of a pack's key."""
_SEGMENT_SUFFIX = ".jsonl"  # suffix of a segment's key

_MAX_LISTINGS = 20  # a read restarts at most this often because segments were packed
# Groups: the attempt; number of the segment, or of a pack's first segment; number of a pack's last segment.
_KEY_PATTERN = re.compile(r"\w+/a(\d{6,12})/(\d{8,12})(?:\.jsonl|-(\d{8,12})\.parquet)")


@dataclass(frozen=True)
class SegmentRange:
    """One stored object, a segment or a pack, which holds segments `first` to `last` of an attempt. `size`: bytes."""

    first: int
    last: int
    key: str
    size: int

    @property
    def packed(self) -> bool:
        return self.key.endswith(PACK_SUFFIX)


def segment_prefix(folder: str, attempt: int) -> str:
    return f"{folder}/a{attempt:06d}/"


def segment_key(folder: str, attempt: int, number: int) -> str:
    """Return the key of a segment. Segments of an attempt are numbered from 0 without gaps."""
    return f"{segment_prefix(folder, attempt)}{number:08d}{_SEGMENT_SUFFIX}"


def pack_key(folder: str, attempt: int, first: int, last: int) -> str:
    return f"{segment_prefix(folder, attempt)}{first:08d}-{last:08d}{PACK_SUFFIX}"


def list_segments(store: Store, prefix: str) -> dict[int, list[SegmentRange]]:
    """Return all segments and packs below `prefix`, by attempt, in order. Packed segments may still be among them.

    It lists twice. If a segment is packed during the first listing, that listing can miss both: the segment, which is
    deleted already, and the pack, which was created after its place in the listing. The second listing finds the pack.
    """
    entries = {entry.key: entry for _ in range(2) for entry in store.list(prefix)}
    found: dict[int, list[SegmentRange]] = {}
    for entry in entries.values():
        if match := _KEY_PATTERN.fullmatch(entry.key):
            first = int(match[2])
            stretch = SegmentRange(first, int(match[3] or first), entry.key, entry.size)
            found.setdefault(int(match[1]), []).append(stretch)
    return {attempt: sorted(found[attempt], key=_sort_key) for attempt in sorted(found)}


def without_overlaps(segment_ranges: list[SegmentRange], after: int = -1) -> list[SegmentRange]:
    """Return the objects from which each segment after number `after` can be read.

    The packs among them may still overlap, if two starts packed at the same time; readers must skip segments that they
    have read.
    """
    chosen = []
    for stretch in sorted(segment_ranges, key=_sort_key):
        if stretch.last > after:
            chosen.append(stretch)
            after = stretch.last
    return chosen


def read_segments(
    store: Store, folder: str, attempt: int, segment_ranges: list[SegmentRange] | None = None, after: int = -1
) -> Iterator[tuple[SegmentRange, bytes | None]]:
    """Yield the objects of an attempt that hold the segments after number `after`, in order: segments with their bytes,
    packs with None.

    If a segment is packed during the call, its pack is yielded instead. Raises StoreError.

    Args:
        segment_ranges: the attempt's objects, if the caller has listed them already.
    """
    for _ in range(_MAX_LISTINGS):
        if segment_ranges is None:
            segment_ranges = list_segments(store, segment_prefix(folder, attempt)).get(attempt, [])
        try:
            for stretch, data in _read_contents(store, without_overlaps(segment_ranges, after)):
                yield stretch, data
                after = stretch.last
            return
        except KeyMissing as error:
            segment_ranges, missing = None, error
    raise missing


def _sort_key(segment_range: SegmentRange) -> tuple[int, int]:
    return segment_range.first, -segment_range.last  # a pack comes before its own first segment


def _read_contents(store: Store, segment_ranges: list[SegmentRange]) -> Iterator[tuple[SegmentRange, bytes | None]]:
    data = parallel_map(lambda stretch: None if stretch.packed else store.get(stretch.key), segment_ranges)
    yield from zip(segment_ranges, data, strict=True)


MAX_PACK_BYTES = 8 << 20  # a pack is full when its segments have this many bytes
_SEGMENT, _STEP_LINE, _OTHER_LINE = "in-segment", "step-line", "other-line"  # columns; no field has a hyphen
_METADATA_KEY = "maskfleet"  # key of the pack's description in the file metadata


class DamagedPack(RunError):
    """A pack is damaged."""


def make_pack(first_number: int, segments: list[bytes], names: list[str]) -> bytes:
    """Return the bytes of a pack of `segments`, which are numbered from `first_number`. `names`: their names in
    messages.

    Raises RunError if a newer version wrote one of the records.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    builder, numbers, lines, steps = TableBuilder(), list[int](), list[bytes](), list[bool]()
    for number, (data, name) in enumerate(zip(segments, names, strict=True), start=first_number):
        lines += data.splitlines(keepends=True)
        steps += builder.add(number, name, data)
        numbers += [number] * (len(lines) - len(numbers))
    columns = builder.build().columns
    arrays = {name: _spread_column(column, np.array(steps, dtype=bool)) for name, column in columns.items()}
    arrays[_SEGMENT] = pa.array(numbers, pa.int64())
    for name, kind in ((_STEP_LINE, True), (_OTHER_LINE, False)):
        of_kind = [line if step == kind else None for line, step in zip(lines, steps, strict=True)]
        arrays[name] = pa.array(of_kind, pa.binary())
    table, file = pa.table(arrays), pa.BufferOutputStream()
    about = json.dumps({"format": 1, "lines": len(lines), "fields": list(columns)}).encode()
    settings = {"write_statistics": False, "write_page_checksum": True, "store_schema": False}
    with pq.ParquetWriter(file, table.schema, compression="zstd", use_dictionary=False, **settings) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({_METADATA_KEY: add_digest(_METADATA_KEY, about)})
    return bytes(file.getvalue())


def _spread_column(column: Floats, rows: NDArray[np.bool_]) -> "pa.Array":
    """Return [lines], the values of `column` in the rows of step records (mask `rows`); null for NaN and other rows."""
    import pyarrow as pa

    values = np.full(len(rows), np.nan)
    values[rows] = column
    return pa.array(values, from_pandas=True)


class Pack:
    """Reads a stored pack, one column at a time. Several threads may use it.

    All methods raise DamagedPack and StoreError. The constructor raises RunError if a newer version wrote the pack.

    Attributes:
        fields: names of the numeric fields of its step records.
    """

    def __init__(self, store: Store, segment_range: SegmentRange) -> None:
        self._store, self.stretch = store, segment_range
        self._name = f"{store.uri}/{segment_range.key}"
        self._metadata: pa.FileMetaData | None = None
        with self._raising_damaged_pack():
            file = self._open_file()
            body = strip_digest(_METADATA_KEY, (file.metadata.metadata or {})[_METADATA_KEY.encode()])
            if body is None:
                raise ValueError("its metadata does not match its digest")
            about = json.loads(body)
            if has_newer_format(about):
                raise RunError(newer_version_message(self._name), remedy=NEWER_REMEDY)
            self._lines: int = about["lines"]
            self.fields: list[str] = about["fields"]
            own = {_SEGMENT: "int64", _STEP_LINE: "binary", _OTHER_LINE: "binary"}
            columns = [(field.name, str(field.type)) for field in file.schema_arrow]
            if columns != list((dict.fromkeys(self.fields, "double") | own).items()):
                raise ValueError("its columns are not those that its metadata lists")
            self._metadata = file.metadata

    def segment_numbers(self) -> Ints:
        """Return [steps] int64, the number of the segment that holds each step record."""
        return self._line_segments()[self._step_rows]

    def column(self, field: str) -> Floats:
        """Return [steps] float64, one field of all step records; NaN where it is not a number."""
        values = self._read_columns([field]).column(0).to_numpy()
        return np.asarray(values, dtype=np.float64)[self._step_rows]

    def table(self) -> StepTable:
        """Return the pack's records without the columns of step records, which `column` reads from the store."""
        builder, segments = TableBuilder(), self._line_segments()
        begins = np.searchsorted(segments, segments)
        folder = self._name.rpartition("/")[0]
        for row, line in enumerate(self._read_columns([_OTHER_LINE]).column(0).to_pylist()):
            if line is not None:
                number = int(segments[row])
                name = f"{folder}/{number:08d}{_SEGMENT_SUFFIX}"
                builder.add(number, name, line, first_line=row - int(begins[row]) + 1)
        others = builder.build()
        return StepTable(self.segment_numbers(), {}, others.others, others.damage)

    def segment_contents(self) -> Iterator[tuple[int, bytes]]:
        """Yield number and bytes of each packed segment."""
        found = self._read_columns([_STEP_LINE, _OTHER_LINE]).to_pydict()
        lines = [other if step is None else step for step, other in zip(*found.values(), strict=True)]
        numbers = range(self.stretch.first, self.stretch.last + 2)
        bounds = np.searchsorted(self._line_segments(), numbers).tolist()
        for number, (start, stop) in zip(numbers, pairwise(bounds), strict=False):
            yield number, b"".join(lines[start:stop])

    @cached_property
    def _step_rows(self) -> NDArray[np.bool_]:
        """[lines] bool: whether each line is a step record."""
        return np.asarray(self._read_columns([_OTHER_LINE]).column(0).is_null().to_numpy(), dtype=bool)

    def _line_segments(self) -> Ints:
        """Return [lines] int64, the number of the segment that holds each line."""
        numbers = np.asarray(self._read_columns([_SEGMENT]).column(0).to_numpy(), dtype=np.int64)
        named = range(self.stretch.first, self.stretch.last + 1)
        if np.any(np.diff(numbers) < 0) or not all(int(end) in named for end in numbers[[0, -1][: len(numbers)]]):
            raise self._damaged_error("it does not contain the segments that its name says")
        return numbers

    def _read_columns(self, columns: list[str]) -> "pa.Table":
        with self._raising_damaged_pack():
            table = self._open_file().read(columns, use_threads=False)
            if len(table) != self._lines or table.column_names != columns:
                raise ValueError("a column does not have the length that its metadata says")
            return table

    def _open_file(self) -> "pq.ParquetFile":
        import pyarrow.parquet as pq

        return pq.ParquetFile(
            _RangeFile(self._store, self.stretch),
            metadata=self._metadata,
            pre_buffer=False,
            page_checksum_verification=True,
        )

    @contextmanager
    def _raising_damaged_pack(self) -> Iterator[None]:
        """Turn pyarrow's errors about damaged bytes into DamagedPack."""
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError, ValueError, KeyError, TypeError) as error:
            raise self._damaged_error(error) from error

    def _damaged_error(self, reason: object) -> DamagedPack:
        return DamagedPack(
            f"{self._name} is damaged: {reason}", remedy="restore it from a copy; other records are still read"
        )


class _RangeFile(io.RawIOBase):
    """Presents a stored object as a readable file. Each read requests a range of bytes from the store."""

    def __init__(self, store: Store, segment_range: SegmentRange) -> None:
        self._store, self._stretch, self._at = store, segment_range, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._stretch.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = min(len(buffer), self._stretch.size - self._at)
        if length <= 0:
            return 0
        buffer[:length] = self._store.get_range(self._stretch.key, self._at, length)
        self._at += length
        return length
