"""What a checkpoint looks like in the store: its keys, and the manifest that makes it one.

    checkpoints/step-00001000/manifest.json                       the commit; written last
    checkpoints/data/a000003-step-00001000/rank-00000.safetensors what it refers to

The manifest maps ranges of named flat tensors to byte ranges of files, so nobody who loads needs to know how
many ranks wrote it or which of them held what.
"""

from functools import cached_property
from math import prod
from typing import Literal

from pydantic import BaseModel, ConfigDict, JsonValue

ROOT = "checkpoints/"
STEPS = f"{ROOT}step-"
DATA = f"{ROOT}data/"
MANIFEST = "manifest.json"
CHUNK = 4 << 20
ITEM = 4  # bytes of a float32, the only element type


def manifest_key(step: int) -> str:
    return f"{STEPS}{step:08d}/{MANIFEST}"


def data_prefix(attempt: int, step: int) -> str:
    return f"{DATA}a{attempt:06d}-step-{step:08d}/"


def file_key(attempt: int, step: int, rank: int) -> str:
    return f"{data_prefix(attempt, step)}rank-{rank:05d}.safetensors"


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
    """Elements [start, stop) of the flattened parameter `name`, in one file.

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
    files: tuple[File, ...]
    pieces: tuple[Piece, ...]
    state: dict[str, JsonValue]
    lineage: tuple[Segment, ...]
    versions: dict[str, str]
    created: float

    @property
    def key(self) -> str:
        return manifest_key(self.step)

    @property
    def order(self) -> tuple[int, int]:
        """Newer checkpoints compare greater: a later attempt supersedes all that it did not load."""
        return (self.attempt, self.step)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @cached_property
    def pieces_of(self) -> dict[str, list[Piece]]:
        """The pieces of each parameter, by `start`."""
        found: dict[str, list[Piece]] = {name: [] for name in self.shapes}
        for piece in self.pieces:
            found[piece.name].append(piece)
        for pieces in found.values():
            pieces.sort(key=lambda piece: piece.start)
        return found


def elements(shape: tuple[int, ...]) -> int:
    return prod(shape)


def problems(shapes: dict[str, tuple[int, ...]], kinds: tuple[str, ...], pieces: list[Piece]) -> list[str]:
    """What keeps `pieces` from covering every element of every parameter and kind exactly once."""
    found = [f"{piece.name!r} is no parameter" for piece in pieces if piece.name not in shapes]
    by_name: dict[str, list[Piece]] = {name: [] for name in shapes}
    for piece in pieces:
        if piece.name in by_name:
            by_name[piece.name].append(piece)
            if set(piece.offsets) != set(kinds):
                found.append(f"{piece.name} has {sorted(piece.offsets)}, others have {sorted(kinds)}")
    for name, shape in shapes.items():
        found += _gaps(name, elements(shape), sorted(by_name[name], key=lambda piece: piece.start))
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
