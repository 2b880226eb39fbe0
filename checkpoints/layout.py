"""What a checkpoint looks like in the store: its folder, and the manifest that makes it one.

    checkpoints/step-00001000-a000003/rank-00000.safetensors    one file from each rank
    checkpoints/step-00001000-a000003/manifest.json             written last: the commit

The manifest maps ranges of named flat tensors to byte ranges of files, so nobody who loads needs to know how
many ranks wrote it or which of them held what. Every attempt (start of the run) writes under its own name
only, so a process that was thought dead cannot touch what its successor wrote.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from checkpoints.errors import DamagedCheckpoint
from data_service.store.verified import digest
from encoder_core.train.refresh import MEMORY

ROOT = "checkpoints/"
CHUNK = 4 << 20
ITEM = 4  # bytes of a float32, the only element type


@dataclass(frozen=True, order=True)
class Mark:
    """Which checkpoint. Newer ones compare greater: an attempt supersedes all that it did not load."""

    attempt: int
    step: int

    @property
    def folder(self) -> str:
        return f"{ROOT}step-{self.step:08d}-a{self.attempt:06d}/"

    @property
    def manifest(self) -> str:
        return f"{self.folder}manifest.json"

    def file(self, rank: int) -> str:
        return f"{self.folder}rank-{rank:05d}.safetensors"

    @classmethod
    def of(cls, key: str) -> "Mark | None":
        """Whose folder the key lies in."""
        found = re.match(rf"{ROOT}step-(\d+)-a(\d+)/", key)
        return cls(attempt=int(found[2]), step=int(found[1])) if found else None


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class File(Strict):
    """One rank's file.

    Attributes:
        key: relative to the run's root.
        size: bytes.
        chunk: bytes in each chunk, the last one excepted.
        hashes: `data_service.store.verified.digest` of each chunk.
    """

    key: str
    size: int
    chunk: int
    hashes: tuple[str, ...]


class Piece(Strict):
    """Elements [start, stop) of the flattened tensor `name`, in one file.

    Attributes:
        file: index into `Manifest.files`.
        offsets: for each kind of state, the byte offset of element `start` in that file.
    """

    name: str
    start: int
    stop: int
    file: int
    offsets: dict[str, int]


class Segment(Strict):
    """Steps [start, stop) of the run as `attempt` took them."""

    attempt: int
    start: int
    stop: int


class Manifest(Strict):
    """A complete checkpoint: the state after `step` steps.

    Attributes:
        format: version of this layout.
        step: steps taken.
        attempt: the start of the run that wrote it.
        world_size: ranks that wrote it, for the record.
        shapes: of every parameter, by name.
        kinds: of state stored for every parameter ("master", "exp_avg", ...).
        memory: shapes of what the model remembers of the rows before (XLNet), by name, of the kind "memory"; empty
            where memory is a function of weights and data, or there is none.
        files, pieces: where the elements are; all are float32, little-endian.
        state: what the trainer resumes from beside tensors: position, counters, skipped data.
        lineage: which attempt took which of the steps up to `step`, in order; the committed history.
        versions: of our code and its libraries.
        created: seconds since 1970.
    """

    format: Literal[1] = 1
    step: int
    attempt: int
    world_size: int
    shapes: dict[str, tuple[int, ...]]
    kinds: tuple[str, ...]
    memory: dict[str, tuple[int, ...]] = {}
    files: tuple[File, ...]
    pieces: tuple[Piece, ...]
    state: dict[str, JsonValue]
    lineage: tuple[Segment, ...]
    versions: dict[str, str]
    created: float

    @property
    def mark(self) -> Mark:
        return Mark(self.attempt, self.step)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all that is stored, by name."""
        return {**self.shapes, **self.memory}

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """Of state stored under a name."""
        return (MEMORY,) if name in self.memory else self.kinds

    @cached_property
    def pieces_of(self) -> dict[str, list[Piece]]:
        """The pieces of each tensor, by `start`."""
        found: dict[str, list[Piece]] = {name: [] for name in self.tensors}
        for piece in self.pieces:
            found[piece.name].append(piece)
        for pieces in found.values():
            pieces.sort(key=lambda piece: piece.start)
        return found


def encode(manifest: Manifest) -> bytes:
    """The stored form: JSON, with the digest of the manifest's own bytes before it."""
    return _sealed(manifest.model_dump_json().encode())


def decode(data: bytes, where: str) -> Manifest:
    """The manifest in the object at `where`. Raises DamagedCheckpoint if it is not what was written."""
    body = data[len(_sealed(b"")) - 1 : -1]
    reason = "does not match its own digest"
    if data == _sealed(body):
        try:
            return Manifest.model_validate_json(body)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            reason = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    raise DamagedCheckpoint(
        f"{where} cannot be read: {reason}",
        remedy="an earlier checkpoint is used; restore the file from a copy if you need this one",
    )


def _sealed(body: bytes) -> bytes:
    return b'{"digest":"' + digest(body).encode() + b'","manifest":' + body + b"}"


def elements(shape: tuple[int, ...]) -> int:
    return prod(shape)


def problems(manifest: Manifest) -> list[str]:
    """What keeps the pieces from covering every element of every parameter, memory and kind exactly once."""
    by_name: dict[str, list[Piece]] = {name: [] for name in manifest.tensors}
    found = []
    for piece in manifest.pieces:
        if piece.name not in by_name:
            found.append(f"{piece.name!r} is no parameter")
            continue
        by_name[piece.name].append(piece)
        kinds = manifest.kinds_of(piece.name)
        if set(piece.offsets) != set(kinds):
            found.append(f"{piece.name} has {sorted(piece.offsets)}, others have {sorted(kinds)}")
    for name, pieces in by_name.items():
        size = elements(manifest.tensors[name])
        found += _gaps(name, size, sorted(pieces, key=lambda piece: piece.start))
    return found


def _gaps(name: str, size: int, pieces: list[Piece]) -> list[str]:
    found, reached = [], 0
    for piece in pieces:
        if piece.start > reached:
            found.append(f"{name}: no rank holds elements {reached} to {piece.start}")
        if piece.start < reached:
            found.append(f"{name}: two ranks hold elements {piece.start} to {min(reached, piece.stop)}")
        reached = max(reached, piece.stop)
    if reached != size:
        found.append(f"{name}: {size} elements, but the ranks' pieces end at {reached}")
    return found
