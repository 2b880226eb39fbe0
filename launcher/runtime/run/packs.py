"""A pack: many segments of an attempt in one object, from which one field of all their steps is read by itself.

It is a NumPy archive (`.npz`), so that a field of a million steps is an array that is read without the others: no JSON
is parsed for it. Parquet does that as well, but loading its library costs every reader 36 MB. The segments' bytes are
in it as they were, too, so a pack loses nothing, not even damage.

    data, ends           bytes of all segments; where each ends
    segment              of each step record, which segment it lies in
    step.<field>         [steps] float64, NaN where it is no number
    others, damage       what else is in the segments, and what could not be read: JSON
    format               1, as where there is none
"""

import io
import json
import zipfile
import zlib
from collections.abc import Iterator
from typing import Any, cast

import numpy as np

from data_service.formats import REMEDY, newer
from data_service.store.base import Store
from launcher.errors import RunError
from launcher.runtime.run.segments import Stretch
from launcher.runtime.run.step_table import Floats, Ints, Record, StepTable, TableBuilder

MOST_BYTES = 8 << 20  # of the segments in one pack
_LARGEST = 256 << 20  # bytes of an array in it
_BUFFER = 16 << 10  # for heads; what is larger is read past it
_STEP = "step."
_UNSOUND = (zipfile.BadZipFile, zlib.error, ValueError, KeyError, TypeError, EOFError, RuntimeError)


class DamagedPack(RunError):
    """A pack that cannot be read."""


def pack(first: int, segments: list[bytes], names: list[str]) -> bytes:
    """A pack of segments numbered from `first`. `names`: theirs to people."""
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
    """The evaluation records of segments after `number`."""
    return (record for segment, record in table.others if segment > number)
