"""The checkpoints of a run, and the records of rewinds, which say which checkpoints no longer count.

    checkpoints/rewind-a000003.json    attempt 3 rewound the run; created by conditional put, once

An attempt whose loss does not recover writes this record and ends. Checkpoints that this or an earlier attempt
committed after the one named in the record no longer count, even if they are still stored. The next attempt continues
from the named one and skips the data that was read since. Records are never deleted, and every later manifest repeats
the skipped ranges.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import TypeAdapter, ValidationError

from checkpoints.attempt import Attempt
from checkpoints.errors import CheckpointError, DamagedCheckpoint, NewerFormat
from checkpoints.layout import (
    CHECKPOINTS_FOLDER,
    CheckpointManifest,
    CheckpointName,
    LineageSegment,
    add_digest,
    decode_manifest,
    decode_record,
    first_validation_error,
)
from data_service.formats import StrictRecord
from data_service.store.base import Store
from data_service.store.errors import KeyMissing

_REWIND_PREFIX = f"{CHECKPOINTS_FOLDER}rewind-"
_RECORD_KIND = "rewind"  # name under which `add_digest` stores a record
_REWIND_REMEDY = (
    "restore this file from a copy. It records that the run went back to an earlier checkpoint; without it, the "
    "abandoned checkpoints would be used again"
)
SKIPS_KEY = "skips"
"""Key under which a manifest's state holds the skipped ranges of data."""

SampleSpan = tuple[int, int, int, int]
"""A range of samples: (phase, epoch, start, stop)."""

_SPANS_TYPE = TypeAdapter(tuple[SampleSpan, ...])  # checks what a manifest's state holds under `SKIPS_KEY`


class Rewind(StrictRecord):
    """The record of a rewind: the run returned to an earlier checkpoint.

    Attributes:
        attempt: attempt that rewound the run; 0 if the rewind was decided before the first attempt.
        to: checkpoint from which the run continues; None if it restarts at its first step.
        began: step at which the loss began to diverge.
        reached: number of steps taken when the run was rewound.
        cause: reason, for people to read.
        skips: ranges of data that are skipped from then on, those of earlier rewinds included.
    """

    attempt: int
    to: CheckpointName | None
    began: int
    reached: int
    cause: str
    skips: tuple[SampleSpan, ...]


def record_rewind(store: Store, rewind: Rewind, attempt: Attempt) -> None:
    """Store the record of a rewind. The rewind is in effect once this returns.

    Raises:
        Superseded: a newer attempt has been claimed, and decides itself whether to rewind.
        CheckpointError: this attempt has already recorded another rewind.
    """
    attempt.ensure_current()
    key = f"{_REWIND_PREFIX}a{rewind.attempt:06d}.json"
    data = add_digest(_RECORD_KIND, rewind.model_dump_json().encode())
    if not store.put_if_absent(key, data) and store.get(key) != data:
        raise CheckpointError(
            f"attempt {rewind.attempt} has already recorded a rewind, which differs: {store.uri}/{key}",
            remedy="start the run again: every start has its own attempt number",
        )


def read_rewinds(store: Store) -> list[Rewind]:
    """Return the records of all rewinds, oldest first.

    Raises DamagedCheckpoint: a record cannot be read. Without it the run could continue from a checkpoint that no
    longer counts.
    """
    keys = sorted(entry.key for entry in store.list(_REWIND_PREFIX))
    return [
        decode_record(Rewind, _RECORD_KIND, store.get(key), f"{store.uri}/{key}", remedy=_REWIND_REMEDY) for key in keys
    ]


def is_abandoned(name: CheckpointName, rewinds: Sequence[Rewind]) -> bool:
    """Return whether a rewind has abandoned this checkpoint: the run returned to an earlier one."""
    return any(name.attempt <= rewind.attempt and (rewind.to is None or name > rewind.to) for rewind in rewinds)


def skipped_ranges(manifest: CheckpointManifest | None, rewinds: Sequence[Rewind]) -> tuple[SampleSpan, ...]:
    """Return the ranges of data that a run skips if it continues from the checkpoint of `manifest`, or from step 0 if
    None.

    Raises DamagedCheckpoint: the manifest's list of skipped ranges cannot be read.
    """
    made_by = manifest.attempt if manifest else 0
    if rewinds and rewinds[-1].attempt >= made_by:
        return rewinds[-1].skips
    try:
        return _SPANS_TYPE.validate_python(manifest.state.get(SKIPS_KEY, []) if manifest else [])
    except ValidationError as error:
        raise DamagedCheckpoint(
            f"the skipped data in a checkpoint of attempt {made_by} cannot be read: {first_validation_error(error)}",
            remedy="restore its manifest from a copy, or move it away so that an earlier checkpoint is used",
        ) from error


@dataclass(frozen=True)
class CheckpointFolder:
    """The stored objects of one checkpoint, committed or not. `sizes`: size in bytes of each, by key."""

    name: CheckpointName
    sizes: dict[str, int]

    @property
    def is_committed(self) -> bool:
        return self.name.manifest_key in self.sizes


@dataclass(frozen=True)
class CheckpointRow:
    """One line of `maskfleet checkpoints list`.

    Attributes:
        step, attempt: name of the checkpoint.
        bytes: bytes stored for it.
        created: time of the commit (seconds since 1970); None if the manifest cannot be read.
        world_size: number of ranks that wrote it; None if the manifest cannot be read.
        abandoned: whether the run continued from an earlier checkpoint, so that this one is not part of its history.
        problem: reason why the manifest cannot be read; None if it can.
    """

    step: int
    attempt: int
    bytes: int
    created: float | None = None
    world_size: int | None = None
    abandoned: bool = False
    problem: str | None = None


def list_folders(store: Store) -> list[CheckpointFolder]:
    """Return the folders of all checkpoints, committed or not, newest first, from one listing of the store."""
    sizes: dict[CheckpointName, dict[str, int]] = {}
    for entry in store.list(CHECKPOINTS_FOLDER):
        name = CheckpointName.from_key(entry.key)
        if name is not None:
            sizes.setdefault(name, {})[entry.key] = entry.size
    return [CheckpointFolder(name, sizes[name]) for name in sorted(sizes, reverse=True)]


def list_committed(store: Store) -> list[CheckpointName]:
    """Return the checkpoints that have a manifest, newest first, without those that a rewind abandoned."""
    rewinds = read_rewinds(store)
    names = [folder.name for folder in list_folders(store) if folder.is_committed]
    return [name for name in names if not is_abandoned(name, rewinds)]


def read_manifest(store: Store, name: CheckpointName) -> CheckpointManifest:
    """Return the manifest of the checkpoint `name`.

    Raises:
        DamagedCheckpoint: the manifest is missing, damaged, or that of another checkpoint.
        NewerFormat: a newer version of Maskfleet wrote it.
    """
    where = f"{store.uri}/{name.manifest_key}"
    try:
        manifest = decode_manifest(store.get(name.manifest_key), where)
    except KeyMissing as error:
        raise DamagedCheckpoint(f"{where} is missing", remedy="use another checkpoint") from error
    if manifest.name != name:
        raise DamagedCheckpoint(
            f"{where} belongs to another folder: it is the manifest of step {manifest.step}, attempt "
            f"{manifest.attempt}",
            remedy="give the folder its original name back",
        )
    return manifest


def checkpoint_rows(store: Store) -> list[CheckpointRow]:
    """Return a row for each committed checkpoint of the run, newest first."""
    found = []
    rewinds = read_rewinds(store)
    lineage: tuple[LineageSegment, ...] | None = None
    for folder in list_folders(store):
        if not folder.is_committed:
            continue
        name, size = folder.name, sum(folder.sizes.values())
        row = CheckpointRow(name.step, name.attempt, size)
        try:
            manifest = read_manifest(store, name)
        except (DamagedCheckpoint, NewerFormat) as error:
            found.append(replace(row, problem=error.problem))
            continue
        abandoned = is_abandoned(name, rewinds)
        if not abandoned:
            lineage = lineage or manifest.lineage
            abandoned = not is_on_lineage(lineage, name)
        found.append(replace(row, created=manifest.created, world_size=manifest.world_size, abandoned=abandoned))
    return found


def is_on_lineage(lineage: tuple[LineageSegment, ...], name: CheckpointName) -> bool:
    """Return whether the checkpoint is part of the history `lineage`.

    The start of a segment counts, too, because a checkpoint of the run's first step has a segment without steps.
    """
    return any(part.attempt == name.attempt and part.start <= name.step <= part.stop for part in lineage)
