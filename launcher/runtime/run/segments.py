"""Where a run's records lie: segments, numbered for each attempt, and packs, each of which holds many of them.

    metrics/a000002/00000007.jsonl             segment 7 of attempt 2: JSON lines
    metrics/a000002/00000000-00000511.npz      segments 0 to 511 of it, in one object

A segment's bytes never change, and only its own attempt writes it, so a segment that lies there twice, in a pack and
by itself, is the same segment: it is read once, from the pack.

A pack is a NumPy archive (`.npz`), so that a field of a million steps is an array that is read without the others: no
JSON is parsed for it. Parquet does that as well, but loading its library costs every reader 36 MB. The segments' bytes
are in it as they were, too, so a pack loses nothing, not even damage.

    data, ends           bytes of all segments; where each ends
    segment              of each step record, which segment it lies in
    step.<field>         [steps] float64, NaN where it is no number
    others, damage       what else is in the segments, and what could not be read: JSON
    format               1, as where there is none
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
from launcher.runtime.run.step_table import Floats, Ints, Record, StepTable, TableBuilder

METRICS = "metrics"
EVENTS = "events"

_READERS = 16  # concurrent gets: segments are small, so many of them on S3 are bound by latency
_AT_ONCE = 64  # segments in memory
_RELISTINGS = 20  # of an attempt whose segments go into packs while they are read
_KEY = re.compile(r"\w+/a(\d{6,12})/(\d{8,12})(?:\.jsonl|-(\d{8,12})\.npz)")


@dataclass(frozen=True)
class Stretch:
    """One object: segments `first` to `last` of an attempt. `size` in bytes."""

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
    """An attempt's segments are numbered from 0, without a gap."""
    return f"{segment_prefix(folder, attempt)}{number:08d}.jsonl"


def pack_key(folder: str, attempt: int, first: int, last: int) -> str:
    return f"{segment_prefix(folder, attempt)}{first:08d}-{last:08d}.npz"


def stored(store: Store, prefix: str) -> dict[int, list[Stretch]]:
    """Return what lies below a prefix, by attempt, in order: segments and packs, including segments that are in a
    pack too.

    Lists twice. A segment may be packed while the first listing is under way: then that listing can miss both, the
    segment because it was deleted, the pack because it came later. The second listing finds the pack.
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
    """Of what is stored of an attempt, the objects that hold each segment after number `after`, none needlessly.

    Packs may overlap where two starts packed at the same time: a reader leaves out segments that it has read.
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
    """An attempt's objects in order, each segment after number `after` in one of them: segments with their bytes, packs
    with None. `stretches`: of a listing. One that goes into a pack meanwhile is found there. Raises StoreError.
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
    if len(stretches) <= 1:  # the usual look at what is new
        yield from ((stretch, _get(store, stretch)) for stretch in stretches)
        return
    with ThreadPoolExecutor(_READERS) as pool:
        while batch := list(islice(remaining, _AT_ONCE)):
            yield from zip(batch, pool.map(lambda stretch: _get(store, stretch), batch), strict=True)


def _get(store: Store, stretch: Stretch) -> bytes | None:
    return None if stretch.packed else store.get(stretch.key)


MOST_BYTES = 8 << 20  # of the segments in one pack
_LARGEST = 256 << 20  # bytes of an array in it
_BUFFER = 16 << 10  # for heads; what is larger is read past it
_STEP = "step."
_UNSOUND = (zipfile.BadZipFile, zlib.error, ValueError, KeyError, TypeError, EOFError, RuntimeError)


class DamagedPack(RunError):
    """A pack that cannot be read."""


def pack(first: int, segments: list[bytes], names: list[str]) -> bytes:
    """Return a pack of segments numbered from `first`. `names`: theirs to people."""
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
    """A stored pack, of which only what is asked for is read. Every method raises DamagedPack, StoreError; to open one
    that a newer version wrote raises RunError."""

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
        """[steps] which segment each step record lies in."""
        return np.asarray(self._array("segment"), dtype=np.int64)

    def column(self, field: str) -> Floats:
        """[steps] NaN where there is no number."""
        return np.asarray(self._array(_STEP + field), dtype=np.float64)

    def table(self) -> StepTable:
        """Its parts but the columns, which are left in the store."""
        others = tuple((int(number), record) for number, record in self._json("others"))
        damage = tuple(str(line) for line in self._json("damage"))
        return StepTable(self.segments(), {}, others, damage)

    def contents(self) -> Iterator[tuple[int, bytes]]:
        """The segments as they were, by number."""
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
    """A stored object as a file that is read by range."""

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


def others_after(table: StepTable, number: int) -> Iterator[Record]:
    """Return the evaluation records of segments after `number`."""
    return (record for segment, record in table.others if segment > number)
