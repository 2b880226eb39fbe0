"""Sources of uploads to object stores: buffers in memory or a local file. Any byte range can be read repeatedly."""

import os
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

PART_BYTES = 16 << 20  # bytes of a part of an upload, and of one read of a download
WRITER_FIELD = "writer"  # metadata field with the random id of the object's writer


class Buffers:
    """An upload source: the concatenation of contiguous buffers, which are not copied as a whole."""

    def __init__(self, buffers: Sequence[memoryview]) -> None:
        self._buffers = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
        self._ends = list(accumulate(len(buffer) for buffer in self._buffers))
        self.size = self._ends[-1] if self._ends else 0

    def read(self, start: int, length: int) -> bytes:
        pieces = []
        number = bisect_right(self._ends, start)
        while length and number < len(self._buffers):
            buffer = self._buffers[number]
            offset = start - (self._ends[number] - len(buffer))
            pieces.append(buffer[offset : offset + length])
            start, length, number = start + len(pieces[-1]), length - len(pieces[-1]), number + 1
        return b"".join(pieces)


class LocalFile:
    """An upload source: a file on this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size = path.stat().st_size

    def read(self, start: int, length: int) -> bytes:
        with self._path.open("rb", buffering=0) as file:
            return os.pread(file.fileno(), length, start)


UploadSource = Buffers | LocalFile
