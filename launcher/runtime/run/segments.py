"""The objects that hold a run's records: segments, numbered for each attempt, and packs of many segments.

    metrics/a000002/00000007.jsonl             segment 7 of attempt 2: JSON lines
    metrics/a000002/00000000-00000511.npz      pack of segments 0 to 511 of attempt 2

A segment's bytes never change, and only its own attempt writes it. So a segment that is stored twice, in a pack and by
itself, is read once, from the pack.

A pack is a NumPy archive (`.npz`): each field of the step records is an array that can be read without the others and
without parsing JSON. Parquet would allow that too, but loading its library costs every reader 36 MB. A pack also has
the bytes of the segments, so it loses nothing, not even damaged lines.

    data, ends           bytes of all segments joined; offset at which each ends
    segment              [steps] number of the segment that holds each step record
    step.<field>         [steps] float64, NaN if the field is not a number
    others, damage       JSON: records of other kinds, by segment; messages about lines that could not be read
    format               1; packs without it have format 1, too
"""

import io
import json
import re
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any, cast

import numpy as np

from data_service.formats import REMEDY, newer
from data_service.store.base import Store
from data_service.store.errors import KeyMissing
from launcher.errors import RunError
from launcher.runtime.run.step_table import Floats, Ints, StepTable, TableBuilder

METRICS = "metrics"
EVENTS = "events"

_READERS = 16  # concurrent gets: segments are small, so on S3 latency limits a single reader
_AT_ONCE = 64  # number of segments in memory
_RELISTINGS = 20  # most listings of an attempt whose segments are packed while they are read
_KEY = re.compile(r"\w+/a(\d{6,12})/(\d{8,12})(?:\.jsonl|-(\d{8,12})\.npz)")


@dataclass(frozen=True)
class Stretch:
    """One stored object, a segment or a pack: segments `first` to `last` of an attempt. `size` is in bytes."""

    first: int
    last: int
    key: str
    size: int

    @property
    def packed(self) -> bool:
        return self.key.endswith(".npz")


def segment_prefix(folder: str, attempt: int) -> str:
    return f"{folder}/a{attempt:06d}/"


def segment_key(folder: str, attempt: int, number: int) -> str:
    """Return the key of a segment. An attempt's segments are numbered from 0, without a gap."""
    return f"{segment_prefix(folder, attempt)}{number:08d}.jsonl"


def pack_key(folder: str, attempt: int, first: int, last: int) -> str:
    return f"{segment_prefix(folder, attempt)}{first:08d}-{last:08d}.npz"


def stored(store: Store, prefix: str) -> dict[int, list[Stretch]]:
    """Return the segments and packs below a prefix, by attempt, in order; also segments that are in a pack too.

    It lists twice. If a segment is packed during the first listing, that listing can miss both: the segment because it
    is deleted already, the pack because it is created later. The second listing finds the pack.
    """
    entries = {entry.key: entry for _ in range(2) for entry in store.list(prefix)}
    found: dict[int, list[Stretch]] = {}
    for entry in entries.values():
        if match := _KEY.fullmatch(entry.key):
            first = int(match[2])
            stretch = Stretch(first, int(match[3] or first), entry.key, entry.size)
            found.setdefault(int(match[1]), []).append(stretch)
    return {attempt: sorted(found[attempt], key=_order) for attempt in sorted(found)}


def once(stretches: list[Stretch], after: int = -1) -> list[Stretch]:
    """Return those of an attempt's objects that are needed to read each segment after number `after`.

    Packs may overlap if two starts of the run packed at the same time; a reader must skip segments that it has read.
    """
    chosen = []
    for stretch in sorted(stretches, key=_order):
        if stretch.last > after:
            chosen.append(stretch)
            after = stretch.last
    return chosen


def read(
    store: Store, folder: str, attempt: int, stretches: list[Stretch] | None = None, after: int = -1
) -> Iterator[tuple[Stretch, bytes | None]]:
    """Yield the objects of an attempt that hold the segments after number `after`, in order: segments with their bytes,
    packs with None.

    A segment that is packed meanwhile is found in its pack. Raises StoreError.

    Args:
        stretches: the attempt's objects, if the caller has listed them.
    """
    for _ in range(_RELISTINGS):
        if stretches is None:
            stretches = stored(store, segment_prefix(folder, attempt)).get(attempt, [])
        try:
            for stretch, data in _contents(store, once(stretches, after)):
                yield stretch, data
                after = stretch.last
            return
        except KeyMissing as error:
            stretches, missing = None, error
    raise missing


def _order(stretch: Stretch) -> tuple[int, int]:
    return stretch.first, -stretch.last


def _contents(store: Store, stretches: list[Stretch]) -> Iterator[tuple[Stretch, bytes | None]]:
    remaining = iter(stretches)
    if len(stretches) <= 1:  # the usual case of a follower: one new segment or none
        yield from ((stretch, _get(store, stretch)) for stretch in stretches)
        return
    with ThreadPoolExecutor(_READERS) as pool:
        while batch := list(islice(remaining, _AT_ONCE)):
            yield from zip(batch, pool.map(lambda stretch: _get(store, stretch), batch), strict=True)


def _get(store: Store, stretch: Stretch) -> bytes | None:
    return None if stretch.packed else store.get(stretch.key)


MOST_BYTES = 8 << 20  # number of bytes of segments that fill a pack
_LARGEST = 256 << 20  # largest number of bytes of an array in a pack
_BUFFER = 16 << 10  # bytes, for the headers of the archive; larger reads bypass the buffer
_STEP = "step."
_UNSOUND = (zipfile.BadZipFile, zlib.error, ValueError, KeyError, TypeError, EOFError, RuntimeError)


class DamagedPack(RunError):
    """A pack that cannot be read."""


def pack(first: int, segments: list[bytes], names: list[str]) -> bytes:
    """Return a pack of segments numbered from `first`. `names`: names of the segments in messages about damage."""
    builder = TableBuilder()
    for index, (data, name) in enumerate(zip(segments, names, strict=True)):
        builder.add(first + index, name, data)
    table = builder.build()
    file = io.BytesIO()
    arrays: dict[str, Any] = {_STEP + name: column for name, column in table.columns.items()}
    np.savez_compressed(
        file,
        data=np.frombuffer(b"".join(segments), dtype=np.uint8),
        ends=np.cumsum([len(data) for data in segments], dtype=np.int64),
        segment=table.segments,
        others=_bytes(table.others),
        damage=_bytes(table.damage),
        format=np.int64(1),
        **arrays,
    )
    return file.getvalue()


class Pack:
    """A stored pack. Only the arrays that are asked for are read.

    Every method raises DamagedPack and StoreError. The constructor raises RunError if a newer version wrote the pack.
    """

    def __init__(self, store: Store, stretch: Stretch) -> None:
        self.stretch = stretch
        self._name = f"{store.uri}/{stretch.key}"
        file = io.BufferedReader(_Ranges(store, stretch), _BUFFER)
        try:
            self._arrays = cast("np.lib.npyio.NpzFile", np.load(file, allow_pickle=False))
            sizes = [member.file_size for member in self._arrays.zip.infolist()]  # type: ignore[union-attr]
        except _UNSOUND as error:
            raise self._damaged(error) from error
        if max(sizes, default=0) > _LARGEST:
            raise self._damaged(f"one of its arrays would take {max(sizes):,} bytes")
        if "format" in self._arrays.files and np.any(self._array("format") > 1):
            raise RunError(newer(self._name), remedy=REMEDY)

    @property
    def fields(self) -> list[str]:
        return [name.removeprefix(_STEP) for name in self._arrays.files if name.startswith(_STEP)]

    def segments(self) -> Ints:
        """Return [steps], the number of the segment that holds each step record."""
        return np.asarray(self._array("segment"), dtype=np.int64)

    def column(self, field: str) -> Floats:
        """Return [steps], a field of the step records; NaN where it is not a number."""
        return np.asarray(self._array(_STEP + field), dtype=np.float64)

    def table(self) -> StepTable:
        """Return the pack's table without its columns, which stay in the store."""
        others = tuple((int(number), record) for number, record in self._json("others"))
        damage = tuple(str(line) for line in self._json("damage"))
        return StepTable(self.segments(), {}, others, damage)

    def contents(self) -> Iterator[tuple[int, bytes]]:
        """Yield number and bytes of each segment."""
        data, start = self._array("data").tobytes(), 0
        ends = self._array("ends").tolist()
        if len(ends) != self.stretch.last - self.stretch.first + 1 or ends[-1] != len(data):
            raise self._damaged("it does not hold the segments that it is named after")
        for index, end in enumerate(ends):
            yield self.stretch.first + index, data[start:end]
            start = end

    def _json(self, name: str) -> list[Any]:
        try:
            return cast("list[Any]", json.loads(self._array(name).tobytes()))
        except ValueError as error:
            raise self._damaged(error) from error

    def _array(self, name: str) -> Any:
        try:
            return self._arrays[name]
        except _UNSOUND as error:
            raise self._damaged(error) from error

    def _damaged(self, reason: object) -> DamagedPack:
        return DamagedPack(
            f"{self._name} is damaged: {reason}", remedy="restore it from a copy; the rest is read without it"
        )


class _Ranges(io.RawIOBase):
    """A stored object as a file. Each read requests a range of bytes."""

    def __init__(self, store: Store, stretch: Stretch) -> None:
        self._store, self._stretch, self._at = store, stretch, 0

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


def _bytes(value: tuple[Any, ...]) -> Any:
    return np.frombuffer(json.dumps(value).encode(), dtype=np.uint8)
