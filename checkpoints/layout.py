"""The layout of a checkpoint in the store: its folder, and the manifest without which the folder is no checkpoint.

    checkpoints/step-00001000-a000003/rank-00000.safetensors    one file from each rank (`save.py` lays it out)
    checkpoints/step-00001000-a000003/manifest.json             written last: the commit

The manifest maps ranges of named flat tensors to byte ranges of files. So a reader need not know how many ranks wrote
the checkpoint, or which rank held which range. Every attempt writes only to folders with its own number, so a process
that was wrongly considered dead cannot change what its successor wrote.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Annotated, Literal, TypeVar

from pydantic import Field, FiniteFloat, JsonValue, ValidationError

from checkpoints.errors import DamagedCheckpoint, NewerFormat
from data_service.formats import NEWER_REMEDY, StrictRecord, is_from_newer_version, newer_version_message
from data_service.store.base import digest
from encoder_core.train.settings import MEMORY_KIND

CHECKPOINTS_FOLDER = "checkpoints/"
CHUNK_BYTES = 4 << 20  # bytes of a file that one hash covers
_COUNT_BOUND = 1 << 62  # exclusive upper bound of every count in a manifest
_LISTED_PROBLEMS = 5  # largest number of problems that a message lists
_MAX_CHUNK_BYTES = 64 << 20  # largest chunk in bytes: a reader holds several chunks in memory
F32_BYTES = 4  # bytes of a float32, the only element type
_MANIFEST_REMEDY = "an earlier checkpoint is used instead; to use this one, restore the file from a copy"
R = TypeVar("R", bound=StrictRecord)


@dataclass(frozen=True, order=True)
class CheckpointName:
    """The attempt and the step that name a checkpoint. Newer checkpoints compare greater: first by attempt, then by
    step.
    """

    attempt: int
    step: int

    @property
    def folder(self) -> str:
        return f"{CHECKPOINTS_FOLDER}step-{self.step:08d}-a{self.attempt:06d}/"

    @property
    def manifest_key(self) -> str:
        return f"{self.folder}manifest.json"

    def file_key(self, rank: int) -> str:
        return f"{self.folder}rank-{rank:05d}.safetensors"

    @classmethod
    def from_key(cls, key: str) -> "CheckpointName | None":
        """Return the checkpoint in whose folder `key` lies; None if it lies in no checkpoint's folder."""
        found = re.match(rf"{CHECKPOINTS_FOLDER}step-(\d+)-a(\d+)/", key)
        return cls(attempt=int(found[2]), step=int(found[1])) if found else None


Count = Annotated[int, Field(ge=0, lt=_COUNT_BOUND)]
Shape = Annotated[tuple[Count, ...], Field(max_length=64)]  # torch allows 64 dimensions


class RankFile(StrictRecord):
    """One rank's file.

    Attributes:
        key: key of the file, relative to the run's root.
        size: bytes in the file.
        chunk: bytes in each chunk but the last, which may be shorter.
        hashes: `data_service.store.base.digest` of each chunk, in order.
    """

    key: str
    size: Count
    chunk: Annotated[int, Field(gt=0, le=_MAX_CHUNK_BYTES)]
    hashes: tuple[str, ...]


class StoredRange(StrictRecord):
    """Elements [start, stop) of the flattened tensor `name`, in one file.

    Attributes:
        file: index of the file in `CheckpointManifest.files`.
        offsets: byte offset of element `start` in that file, by kind of state.
    """

    name: str
    start: Count
    stop: Count
    file: Count
    offsets: dict[str, Count]


class LineageSegment(StrictRecord):
    """Steps [start, stop) of the run, which `attempt` trained."""

    attempt: Count
    start: Count
    stop: Count


class CheckpointManifest(StrictRecord):
    """The manifest of a complete checkpoint: the training state after `step` steps.

    Attributes:
        format: version of this layout.
        step: number of steps taken.
        attempt: number of the attempt that wrote it.
        world_size: number of ranks that wrote it, for information only.
        shapes: shape of every parameter, by name.
        kinds: kinds of state ("master", "exp_avg", ...) stored for every parameter that is not in `own_kinds`.
        own_kinds: kinds of state of the other parameters, by name: Muon's hidden matrices ("master", "momentum").
        memory: shapes of XLNet's memory of earlier rows, by name. Its kind of state is "memory". Empty if the model has
            no memory, or if it can be recomputed from weights and data.
        files: files that hold the elements.
        pieces: ranges of elements in those files. All elements are float32, little-endian.
        state: state that a resume needs besides tensors: position, counters, skipped data.
        lineage: attempts that took the steps up to `step`, in order: the committed history.
        versions: versions of Maskfleet, Python and the libraries.
        created: time of the commit (seconds since 1970).
    """

    format: Literal[1] = 1
    step: Count
    attempt: Count
    world_size: Count
    shapes: dict[str, Shape]
    kinds: tuple[str, ...]
    own_kinds: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    memory: dict[str, Shape] = Field(default_factory=dict)
    files: tuple[RankFile, ...]
    pieces: tuple[StoredRange, ...]
    state: dict[str, JsonValue]
    lineage: tuple[LineageSegment, ...]
    versions: dict[str, str]
    created: FiniteFloat

    @property
    def name(self) -> CheckpointName:
        return CheckpointName(self.attempt, self.step)

    @property
    def is_in_memory(self) -> bool:
        """Whether the state is in the memory of the ranks' nodes, and in no file (`checkpoints.memory`)."""
        return not self.files

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files)

    @cached_property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all stored tensors, parameters and memory, by name."""
        return {**self.shapes, **self.memory}

    def state_kinds_of(self, name: str) -> tuple[str, ...]:
        """Return the kinds of state that are stored for the tensor `name`."""
        return (MEMORY_KIND,) if name in self.memory else self.own_kinds.get(name, self.kinds)

    @cached_property
    def pieces_by_name(self) -> dict[str, list[StoredRange]]:
        """The pieces of each tensor, by its name, sorted by `start`."""
        found: dict[str, list[StoredRange]] = {name: [] for name in self.tensor_shapes}
        for piece in self.pieces:
            found[piece.name].append(piece)
        for pieces in found.values():
            pieces.sort(key=lambda piece: piece.start)
        return found


def encode_manifest(manifest: CheckpointManifest) -> bytes:
    """Return the manifest as it is stored: JSON in which a digest precedes the manifest that it was computed from."""
    return add_digest("manifest", manifest.model_dump_json().encode())


def decode_manifest(data: bytes, where: str) -> CheckpointManifest:
    """Return the manifest in `data`, the bytes of the object at `where`, after checking that it makes sense.

    Raises:
        NewerFormat: a newer version of Maskfleet wrote the manifest.
        DamagedCheckpoint: the bytes do not match their digest, or `find_problems` returns problems.
    """
    manifest = decode_record(CheckpointManifest, "manifest", data, where, remedy=_MANIFEST_REMEDY)
    if wrong := find_problems(manifest):
        raise DamagedCheckpoint(f"{where} cannot be read: {summarize_problems(wrong)}", remedy=_MANIFEST_REMEDY)
    return manifest


def decode_record(record_class: type[R], record_name: str, data: bytes, where: str, *, remedy: str) -> R:
    """Return the record in `data`, which `add_digest` made. `where`: URI of the stored object, for messages.

    Raises:
        NewerFormat: a newer version of Maskfleet wrote the record.
        DamagedCheckpoint: the bytes do not match their digest, or hold no such record; with this `remedy`.
    """
    body, reason = strip_digest(record_name, data), "it does not match its own digest"
    if body is not None:
        try:
            return record_class.model_validate_json(body)
        except ValidationError as error:
            if is_from_newer_version(body, known=1, error=error):
                raise NewerFormat(newer_version_message(where), remedy=NEWER_REMEDY) from error
            reason = first_validation_error(error)
    raise DamagedCheckpoint(f"{where} cannot be read: {reason}", remedy=remedy)


def first_validation_error(error: ValidationError) -> str:
    """Return pydantic's first error as text: the name of the field, then the problem."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"


def summarize_problems(wrong: Sequence[str]) -> str:
    """Return the first five problems, and the number of further ones, as text."""
    more = f" and {len(wrong) - _LISTED_PROBLEMS} more" if len(wrong) > _LISTED_PROBLEMS else ""
    return f"{'; '.join(wrong[:_LISTED_PROBLEMS])}{more}"


def add_digest(record_name: str, body: bytes) -> bytes:
    """Return `body` (JSON) as a JSON object that holds its digest and, under the name `record_name`, `body` itself."""
    return b'{"digest":"' + digest(body).encode() + b'","' + record_name.encode() + b'":' + body + b"}"


def strip_digest(record_name: str, data: bytes) -> bytes | None:
    """Return the `body` that `add_digest` was given; None if the bytes do not match their digest."""
    body = data[len(add_digest(record_name, b"")) - 1 : -1]
    return body if data == add_digest(record_name, body) else None


def element_count(shape: tuple[int, ...]) -> int:
    return prod(shape)


def find_problems(manifest: CheckpointManifest) -> list[str]:
    """Return the problems of a manifest; empty for a good one.

    The lineage and the files must make sense. The pieces must cover every element of every parameter and memory exactly
    once for each kind of state, and no two pieces may overlap in a file.
    """
    found = [*_lineage_problems(manifest), *_name_problems(manifest)]
    for rank, file in enumerate(manifest.files):
        found += _file_problems(file, manifest.name.file_key(rank))
    return [*found, *_piece_problems(manifest), *_coverage_problems(manifest)]


def problems_besides_files(manifest: CheckpointManifest) -> list[str]:
    """Return the problems of a manifest except those of its files, for a checkpoint in memory."""
    return [*_lineage_problems(manifest), *_name_problems(manifest), *_coverage_problems(manifest)]


def _lineage_problems(manifest: CheckpointManifest) -> Iterator[str]:
    reached, newest = 0, -1
    for part in manifest.lineage:
        if part.start != reached or part.stop < part.start or part.attempt <= newest:
            yield f"attempt {part.attempt} cannot have taken steps {part.start} to {part.stop} after step {reached}"
        reached, newest = part.stop, part.attempt
    if (newest, reached) != (manifest.attempt, manifest.step):
        yield (
            f"the history ends at step {reached} of attempt {newest}, but the checkpoint is of step {manifest.step} "
            f"of attempt {manifest.attempt}"
        )


def _name_problems(manifest: CheckpointManifest) -> Iterator[str]:
    for name in manifest.shapes.keys() & manifest.memory.keys():
        yield f"the name {name} is a parameter and a memory"
    for kinds in (manifest.kinds, *manifest.own_kinds.values()):
        if len(set(kinds)) != len(kinds):
            yield f"a kind of state is named twice: {', '.join(kinds)}"
    for name in sorted(manifest.own_kinds.keys() - manifest.shapes.keys()):
        yield f"{name!r} is listed in own_kinds, but is not a parameter"
    for name, shape in manifest.tensor_shapes.items():
        if prod(size or 1 for size in shape) >= _COUNT_BOUND:
            yield f"{name} has the shape {list(shape)}, which is too large"


def _file_problems(file: RankFile, key: str) -> Iterator[str]:
    if file.key != key:
        yield f"a file has the key {file.key!r}, but it should be {key}"
    chunks = -(-file.size // file.chunk)
    if len(file.hashes) != chunks:
        yield f"{key} has {len(file.hashes)} hashes for {chunks} chunks"


def _piece_problems(manifest: CheckpointManifest) -> Iterator[str]:
    """Yield pieces that lie outside the files, and files that do not consist of a header and pieces laid end to end."""
    places: list[list[tuple[int, int, str]]] = [[] for _ in manifest.files]
    for piece in manifest.pieces:
        if piece.stop < piece.start:
            yield f"{piece.name} has a piece from {piece.start} to {piece.stop}"
        if piece.file >= len(places):
            yield f"{piece.name} lies in file {piece.file} of {len(places)}"
            continue
        for kind, offset in piece.offsets.items():
            end = offset + (piece.stop - piece.start) * F32_BYTES
            places[piece.file].append((offset, end, f"{kind} of {piece.name} from {piece.start}"))
    for file, held in zip(manifest.files, places, strict=True):
        held.sort()
        for (_, reached, _), (offset, _, what) in pairwise(held):
            if offset != reached:
                yield f"{what} begins at byte {offset} of {file.key}, where the piece before ends at {reached}"
        if held and max(end for _, end, _ in held) != file.size:
            yield f"{held[-1][2]} ends at byte {held[-1][1]} of {file.key}, which has {file.size} bytes"


def _coverage_problems(manifest: CheckpointManifest) -> Iterator[str]:
    """Yield the tensors whose elements are not all stored exactly once, with the right kinds of state."""
    by_name: dict[str, list[StoredRange]] = {name: [] for name in manifest.tensor_shapes}
    for piece in manifest.pieces:
        if piece.name not in by_name:
            yield f"a piece is stored for {piece.name!r}, but {piece.name!r} is no parameter"
            continue
        by_name[piece.name].append(piece)
        kinds = manifest.state_kinds_of(piece.name)
        if set(piece.offsets) != set(kinds):
            whose = "it should have" if piece.name in manifest.own_kinds else "others have"
            yield f"{piece.name} has {sorted(piece.offsets)}, {whose} {sorted(kinds)} as kinds of state"
    for name, pieces in by_name.items():
        size = element_count(manifest.tensor_shapes[name])
        yield from _gaps_and_overlaps(name, size, sorted(pieces, key=lambda piece: piece.start))


def _gaps_and_overlaps(name: str, size: int, pieces: list[StoredRange]) -> Iterator[str]:
    reached = 0
    for piece in pieces:
        if piece.start > reached:
            yield f"{name}: no rank holds elements {reached} to {piece.start}"
        if piece.start < reached:
            yield f"{name}: two ranks hold elements {piece.start} to {min(reached, piece.stop)}"
        reached = max(reached, piece.stop)
    if reached != size:
        yield f"{name} has {size} elements, but the ranks' pieces end at {reached}"
