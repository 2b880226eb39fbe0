"""Loading: each rank reads the ranges of parameters that it needs, of one checkpoint, or of the mean of several."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float32
from torch import Tensor

from checkpoints.errors import CheckpointError
from checkpoints.layout import F32_BYTES, CheckpointManifest, StoredRange, element_count
from checkpoints.verify import read_chunk
from data_service.store.base import Store
from encoder_core.optim.average import AVERAGE
from encoder_core.train.zero_state import MASTER

_CACHED_CHUNKS = 16  # chunks (64 MiB in all) kept for later reads: a small parameter's chunk also holds its neighbours
_READ_THREADS = 8


def ensure_same_optimizer(manifest: CheckpointManifest, own_kinds: Mapping[str, Sequence[str]], uri: str) -> None:
    """Raise CheckpointError if the checkpoint's optimizer state is that of another optimizer than the run uses.

    For example, AdamW's moments cannot initialise Muon's momentum. An average of the weights is not optimizer state: a
    run may start it or drop it.

    Args:
        manifest: manifest of the checkpoint.
        own_kinds: kinds of state of the run that is to continue from it, as in `CheckpointManifest.own_kinds`.
        uri: URI of that run, for the message.
    """
    differing = [
        name
        for name in sorted(manifest.shapes)
        if set(manifest.own_kinds.get(name, ())) ^ set(own_kinds.get(name, ())) - {AVERAGE}
    ]
    if differing:
        name, *others = differing
        wanted = own_kinds.get(name, manifest.kinds if name in manifest.own_kinds else ())
        more = f" (and for {len(others)} more parameters)" if others else ""
        raise CheckpointError(
            f"the checkpoint of step {manifest.step} was saved with another optimizer: for {name}{more} it holds "
            f"{', '.join(manifest.state_kinds_of(name))}, but the recipe's optimizer needs {', '.join(wanted)}",
            remedy="set the optimizer back to what it was; or begin a new run from these weights, without the "
            f"optimizer's state: --set start={uri}",
        )


class CheckpointReader:
    """A reader of ranges of a checkpoint's tensors, which verifies all that it reads. Use it in `with`, or call
    `close`."""

    def __init__(self, store: Store, manifest: CheckpointManifest) -> None:
        self.manifest = manifest
        self._store = store
        self._pool = ThreadPoolExecutor(_READ_THREADS, thread_name_prefix="checkpoint reader")
        self._read_chunk = lru_cache(_CACHED_CHUNKS)(lambda file, index: read_chunk(store, manifest.files[file], index))

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._read_chunk.cache_clear()

    def read_full(self, name: str, kind: str = "master") -> Float32[Tensor, "..."]:
        """Return a whole parameter in its own shape, float32 on the CPU. Raises as `read`."""
        shape = self._shape(name)
        return self.read(name, kind, 0, element_count(shape)).view(shape)

    def read(self, name: str, kind: str, start: int, stop: int) -> Float32[Tensor, " length"]:
        """Return elements [start, stop) of the flattened parameter or memory, float32 on the CPU.

        Raises:
            CheckpointError: the checkpoint has no such parameter, kind of state or range.
            DamagedCheckpoint: stored bytes do not match their hashes.
            StoreError: the store does not answer.
        """
        size, kinds = element_count(self._shape(name)), self.manifest.state_kinds_of(name)
        if not 0 <= start <= stop <= size or kind not in kinds:
            where = f"the checkpoint of step {self.manifest.step} in {self._store.uri}"
            held = f"elements 0 to {size} of {', '.join(kinds)}"
            raise CheckpointError(
                f"{where} has no elements {start} to {stop} of {kind} of {name}; it has {held}",
                remedy="load the checkpoint into the model and optimizer that it was saved from",
            )
        result = torch.empty(stop - start, dtype=torch.float32)
        target = result.numpy().data.cast("B")
        parts = list(self._chunk_slices(name, kind, start, stop))
        list(self._pool.map(lambda part: self._copy_slice(part, target), parts))
        return result

    def _shape(self, name: str) -> tuple[int, ...]:
        shape = self.manifest.tensor_shapes.get(name)
        if shape is None:
            raise CheckpointError(
                f"{self._store.uri} at step {self.manifest.step} has no parameter {name!r}",
                remedy="load the checkpoint into the model that it was saved from",
            )
        return shape

    def _chunk_slices(self, name: str, kind: str, start: int, stop: int) -> Iterator["_ChunkSlice"]:
        """Yield the range as slices, none of which crosses the end of a stored piece or of a chunk."""
        pieces = self.manifest.pieces_by_name[name]
        first = bisect_right(pieces, start, key=lambda piece: piece.start) - 1
        for piece in pieces[max(first, 0) :]:
            if piece.start >= stop:
                return
            begin, end = max(start, piece.start), min(stop, piece.stop)
            yield from self._piece_chunk_slices(piece, kind, begin, end, (begin - start) * F32_BYTES)

    def _piece_chunk_slices(
        self, piece: StoredRange, kind: str, begin: int, end: int, target_offset: int
    ) -> Iterator["_ChunkSlice"]:
        chunk = self.manifest.files[piece.file].chunk
        position = piece.offsets[kind] + (begin - piece.start) * F32_BYTES
        left = (end - begin) * F32_BYTES
        while left:
            index, inside = divmod(position, chunk)
            length = min(left, chunk - inside)
            yield _ChunkSlice(piece.file, index, inside, length, target_offset)
            position, target_offset, left = position + length, target_offset + length, left - length

    def _copy_slice(self, part: "_ChunkSlice", target: memoryview) -> None:
        data = self._read_chunk(part.file, part.chunk)
        target[part.to : part.to + part.length] = data[part.inside : part.inside + part.length]


@dataclass(frozen=True)
class _ChunkSlice:
    """`length` bytes from byte `inside` of a file's chunk, to be copied to byte `to` of the result."""

    file: int
    chunk: int
    inside: int
    length: int
    to: int


_RANGE_ELEMENTS = 1 << 20  # number of elements that are read and averaged at a time


class MeanReader:
    """A reader of the arithmetic mean of the master weights of several checkpoints, all with the same weight.

    Each element is summed in float64, in the order of `readers`, divided by their number and rounded to float32. Memory
    holds one parameter's mean, one range of elements in float64, and the readers' cached chunks.
    """

    def __init__(self, readers: Sequence[CheckpointReader]) -> None:
        self._readers = readers

    def read_full(self, name: str) -> Float32[Tensor, "..."]:
        """Return the mean of a whole parameter in its own shape, on the CPU. Raises as `CheckpointReader.read`."""
        shape = self._readers[0].manifest.shapes[name]
        mean = torch.empty(element_count(shape), dtype=torch.float32)
        for start in range(0, len(mean), _RANGE_ELEMENTS):
            part = mean[start : start + _RANGE_ELEMENTS]
            total = torch.zeros(len(part), dtype=torch.float64)
            for reader in self._readers:
                total += reader.read(name, MASTER, start, start + len(part))
            part.copy_(total / len(self._readers))
        return mean.view(shape)
