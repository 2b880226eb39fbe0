"""What a checkpoint looks like in the store: its folder, and the manifest that makes it one.

    checkpoints/step-00001000-a000003/rank-00000.safetensors    one file from each rank
    checkpoints/step-00001000-a000003/manifest.json             written last: the commit

The manifest maps ranges of named flat tensors to byte ranges of files. So a reader need not know how many ranks wrote
the checkpoint, or which rank held what. Every attempt writes under its own number only, so a process that was wrongly
thought dead cannot change what its successor wrote.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, ValidationError

from checkpoints.errors import DamagedCheckpoint, NewerFormat
from data_service.formats import REMEDY, is_newer, newer
from data_service.store.base import digest
from encoder_core.train.memory_schedule import MEMORY

ROOT = "checkpoints/"
CHUNK = 4 << 20
_MOST = 1 << 62  # of anything that is counted here
_SHOWN = 5  # problems that a message lists
_LARGEST_CHUNK = 64 << 20  # a reader holds some of them in memory
ITEM = 4  # bytes of a float32, the only element type


@dataclass(frozen=True, order=True)
class CheckpointName:
    """The attempt and the step that name a checkpoint. Newer checkpoints compare greater: first by attempt, then by
    step.
    """

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
    def of(cls, key: str) -> "CheckpointName | None":
        """The checkpoint in whose folder the key lies; None if in none."""
        found = re.match(rf"{ROOT}step-(\d+)-a(\d+)/", key)
        return cls(attempt=int(found[2]), step=int(found[1])) if found else None


class Strict(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


Count = Annotated[int, Field(ge=0, lt=_MOST)]
Shape = Annotated[tuple[Count, ...], Field(max_length=64)]  # as many dimensions as a tensor can have


class File(Strict):
    """One rank's file.

    Attributes:
        key: relative to the run's root.
        size: bytes.
        chunk: bytes in each chunk, the last one excepted.
        hashes: `data_service.store.base.digest` of each chunk.
    """

    key: str
    size: Count
    chunk: Annotated[int, Field(gt=0, le=_LARGEST_CHUNK)]
    hashes: tuple[str, ...]


class StoredRange(Strict):
    """Elements [start, stop) of the flattened tensor `name`, in one file.

    Attributes:
        file: index into `CheckpointManifest.files`.
        offsets: for each kind of state, the byte offset of element `start` in that file.
    """

    name: str
    start: Count
    stop: Count
    file: Count
    offsets: dict[str, Count]


class LineageSegment(Strict):
    """Steps [start, stop) of the run as `attempt` took them."""

    attempt: Count
    start: Count
    stop: Count


class CheckpointManifest(Strict):
    """A complete checkpoint: the state after `step` steps.

    Attributes:
        format: version of this layout.
        step: steps taken.
        attempt: the attempt that wrote it.
        world_size: ranks that wrote it, for the record.
        shapes: of every parameter, by name.
        kinds: of state stored for every parameter ("master", "exp_avg", ...) but those of `own_kinds`.
        own_kinds: of parameters that have others, by name: Muon's hidden matrices ("master", "momentum").
        memory: shapes of XLNet's memory of earlier rows, by name, of the kind "memory". Empty if the model has none,
            or if it can be recomputed from weights and data.
        files, pieces: where the elements are; all are float32, little-endian.
        state: what the trainer resumes from besides tensors: position, counters, skipped data.
        lineage: which attempt took which of the steps up to `step`, in order; the committed history.
        versions: of our code and its libraries.
        created: seconds since 1970.
    """

    format: Literal[1] = 1
    step: Count
    attempt: Count
    world_size: Count
    shapes: dict[str, Shape]
    kinds: tuple[str, ...]
    own_kinds: dict[str, tuple[str, ...]] = {}
    memory: dict[str, Shape] = {}
    files: tuple[File, ...]
    pieces: tuple[StoredRange, ...]
    state: dict[str, JsonValue]
    lineage: tuple[LineageSegment, ...]
    versions: dict[str, str]
    created: FiniteFloat

    @property
    def mark(self) -> CheckpointName:
        return CheckpointName(self.attempt, self.step)

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @cached_property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all that is stored, by name."""
        return {**self.shapes, **self.memory}

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """Of state stored under a name."""
        return (MEMORY,) if name in self.memory else self.own_kinds.get(name, self.kinds)

    @cached_property
    def pieces_of(self) -> dict[str, list[StoredRange]]:
        """The pieces of each tensor, by `start`."""
        found: dict[str, list[StoredRange]] = {name: [] for name in self.tensors}
        for piece in self.pieces:
            found[piece.name].append(piece)
        for pieces in found.values():
            pieces.sort(key=lambda piece: piece.start)
        return found


def encode(manifest: CheckpointManifest) -> bytes:
    """The stored form: JSON, with the digest of the manifest's own bytes before it."""
    return sealed("manifest", manifest.model_dump_json().encode())


def decode(data: bytes, where: str) -> CheckpointManifest:
    """The manifest in the object at `where`, of which every element can be found in some file.

    Raises:
        NewerFormat: a newer version wrote it.
        DamagedCheckpoint: it is not what was written, or could never have been loaded.
    """
    body = unsealed("manifest", data)
    reason = "does not match its own digest"
    if body is not None:
        try:
            manifest = CheckpointManifest.model_validate_json(body)
        except ValidationError as error:
            refuse_newer(body, where, error)
            reason = first_problem(error)
        else:
            wrong = problems(manifest)
            if not wrong:
                return manifest
            reason = summary(wrong)
    raise DamagedCheckpoint(
        f"{where} cannot be read: {reason}",
        remedy="an earlier checkpoint is used; restore the file from a copy if you need this one",
    )


def refuse_newer(body: bytes, where: str, error: ValidationError) -> None:
    """Raises NewerFormat if an intact object at `where` that cannot be read was written by a newer version."""
    if is_newer(body, known=1, error=error):
        raise NewerFormat(newer(where), remedy=REMEDY)


def first_problem(error: ValidationError) -> str:
    """The first thing that pydantic found wrong, and where."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


def summary(wrong: Sequence[str]) -> str:
    """The first few problems, and how many more there are."""
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return f"{'; '.join(wrong[:_SHOWN])}{more}"


def sealed(what: str, body: bytes) -> bytes:
    """JSON with its own digest before it."""
    return b'{"digest":"' + digest(body).encode() + b'","' + what.encode() + b'":' + body + b"}"


def unsealed(what: str, data: bytes) -> bytes | None:
    """What was sealed; None if the bytes do not match their digest."""
    body = data[len(sealed(what, b"")) - 1 : -1]
    return body if data == sealed(what, body) else None


def elements(shape: tuple[int, ...]) -> int:
    return prod(shape)


def problems(manifest: CheckpointManifest) -> list[str]:
    """What is wrong with a manifest; empty for a good one. Its history and files must make sense, and its pieces must
    cover every element of every parameter, memory and kind exactly once, each at a place of its own in a file.
    """
    found = [*_of_history(manifest), *_of_names(manifest)]
    for rank, file in enumerate(manifest.files):
        found += _of_file(file, manifest.mark.file(rank))
    return [*found, *_of_places(manifest), *_of_cover(manifest)]


def _of_history(manifest: CheckpointManifest) -> Iterator[str]:
    reached, newest = 0, -1
    for part in manifest.lineage:
        if part.start != reached or part.stop < part.start or part.attempt <= newest:
            yield f"attempt {part.attempt} cannot have taken steps {part.start} to {part.stop} after step {reached}"
        reached, newest = part.stop, part.attempt
    if (newest, reached) != (manifest.attempt, manifest.step):
        yield f"the history ends at step {reached} of attempt {newest}"


def _of_names(manifest: CheckpointManifest) -> Iterator[str]:
    for name in manifest.shapes.keys() & manifest.memory.keys():
        yield f"{name} is a parameter and a memory"
    for kinds in (manifest.kinds, *manifest.own_kinds.values()):
        if len(set(kinds)) != len(kinds):
            yield f"kinds are named twice: {', '.join(kinds)}"
    for name in sorted(manifest.own_kinds.keys() - manifest.shapes.keys()):
        yield f"{name!r}, which has kinds of its own, is no parameter"
    for name, shape in manifest.tensors.items():
        if prod(size or 1 for size in shape) >= _MOST:
            yield f"{name} has the shape {list(shape)}"


def _of_file(file: File, key: str) -> Iterator[str]:
    if file.key != key:
        yield f"{file.key!r} should be {key}"
    chunks = -(-file.size // file.chunk)
    if len(file.hashes) != chunks:
        yield f"{key} has {len(file.hashes)} hashes for {chunks} chunks"


def _of_places(manifest: CheckpointManifest) -> Iterator[str]:
    """Pieces outside the files, and files that are not a header and pieces laid end to end."""
    places: list[list[tuple[int, int, str]]] = [[] for _ in manifest.files]
    for piece in manifest.pieces:
        if piece.stop < piece.start:
            yield f"{piece.name} has a piece from {piece.start} to {piece.stop}"
        if piece.file >= len(places):
            yield f"{piece.name} lies in file {piece.file} of {len(places)}"
            continue
        for kind, offset in piece.offsets.items():
            end = offset + (piece.stop - piece.start) * ITEM
            places[piece.file].append((offset, end, f"{kind} of {piece.name} from {piece.start}"))
    for file, held in zip(manifest.files, places, strict=True):
        held.sort()
        for (_, reached, _), (offset, _, what) in pairwise(held):
            if offset != reached:
                yield f"{what} begins at byte {offset} of {file.key}, where the piece before ends at {reached}"
        if held and max(end for _, end, _ in held) != file.size:
            yield f"{held[-1][2]} ends at byte {held[-1][1]} of {file.key}, which has {file.size}"


def _of_cover(manifest: CheckpointManifest) -> Iterator[str]:
    by_name: dict[str, list[StoredRange]] = {name: [] for name in manifest.tensors}
    for piece in manifest.pieces:
        if piece.name not in by_name:
            yield f"{piece.name!r} is no parameter"
            continue
        by_name[piece.name].append(piece)
        kinds = manifest.kinds_of(piece.name)
        if set(piece.offsets) != set(kinds):
            whose = "it should have" if piece.name in manifest.own_kinds else "others have"
            yield f"{piece.name} has {sorted(piece.offsets)}, {whose} {sorted(kinds)}"
    for name, pieces in by_name.items():
        size = elements(manifest.tensors[name])
        yield from _gaps(name, size, sorted(pieces, key=lambda piece: piece.start))


def _gaps(name: str, size: int, pieces: list[StoredRange]) -> Iterator[str]:
    reached = 0
    for piece in pieces:
        if piece.start > reached:
            yield f"{name}: no rank holds elements {reached} to {piece.start}"
        if piece.start < reached:
            yield f"{name}: two ranks hold elements {piece.start} to {min(reached, piece.stop)}"
        reached = max(reached, piece.stop)
    if reached != size:
        yield f"{name}: {size} elements, but the ranks' pieces end at {reached}"
