"""Which checkpoints a run has, and which of them it has left behind by going back.

    checkpoints/rewind-a000003.json    attempt 3 went back; created by conditional put, once

An attempt whose loss does not recover writes this record and ends. Checkpoints that were committed after the one named
in the record, by this or an earlier attempt, do not count any more, even if they are still stored. The next attempt
goes on from the named one, and leaves out the data that was read since. Records are kept for ever, and every later
manifest repeats the ranges left out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from checkpoints.attempt import Attempt
from checkpoints.errors import CheckpointError, DamagedCheckpoint, NewerFormat
from checkpoints.layout import (
    ROOT,
    CheckpointManifest,
    CheckpointName,
    LineageSegment,
    Strict,
    decode,
    first_problem,
    refuse_newer,
    sealed,
    unsealed,
)
from data_service.store.base import Store
from data_service.store.errors import KeyMissing

_PREFIX = f"{ROOT}rewind-"
_SEALED = "rewind"
SKIPS = "skips"
"""Where a manifest's state has the ranges left out."""

Span = tuple[int, int, int, int]
"""Samples (phase, epoch, start, stop)."""

_SPANS = TypeAdapter(tuple[Span, ...])


class Rewind(Strict):
    """A run went back.

    Attributes:
        attempt: which attempt went back; 0 if that was decided before the first attempt.
        to: the checkpoint it goes on from; None for the run's first step.
        began: the step at which the loss went wrong.
        reached: steps done when it went back.
        cause: why, for people to read.
        skips: the ranges left out from then on, those of earlier rewinds included.
    """

    attempt: int
    to: CheckpointName | None
    began: int
    reached: int
    cause: str
    skips: tuple[Span, ...]


def record(store: Store, rewind: Rewind, attempt: Attempt) -> None:
    """Stores the record, after which the rewind counts.

    Raises:
        Superseded: a newer attempt has been claimed, and decides for itself.
        CheckpointError: this attempt went back before.
    """
    attempt.ensure_current()
    key = f"{_PREFIX}a{rewind.attempt:06d}.json"
    data = sealed(_SEALED, rewind.model_dump_json().encode())
    if not store.put_if_absent(key, data) and store.get(key) != data:
        raise CheckpointError(
            f"{store.uri}/{key} is there already, and differs",
            remedy="start the run again: every start has a number of its own",
        )


def rewinds(store: Store) -> list[Rewind]:
    """All records, the oldest first.

    Raises DamagedCheckpoint if one cannot be read. Without it the run would go on from a checkpoint that it went back
    past.
    """
    return [_read(store, key) for key in sorted(entry.key for entry in store.list(_PREFIX))]


def _read(store: Store, key: str) -> Rewind:
    data = store.get(key)
    try:
        body = unsealed(_SEALED, data)
        return Rewind.model_validate_json(data if body is None else body)  # the first ones had no digest
    except ValidationError as error:
        refuse_newer(data if body is None else body, f"{store.uri}/{key}", error)
        raise DamagedCheckpoint(
            f"{store.uri}/{key} cannot be read: {first_problem(error)}",
            remedy="restore it from a copy; if you delete it, the run goes on with what it went back from",
        ) from error


def left_behind(mark: CheckpointName, gone_back: Sequence[Rewind]) -> bool:
    """Whether the run has gone back to a step before this checkpoint."""
    return any(
        mark.attempt <= rewind.attempt and (rewind.to is None or mark > rewind.to) for rewind in gone_back
    )


def skips(manifest: CheckpointManifest | None, gone_back: Sequence[Rewind]) -> tuple[Span, ...]:
    """The ranges of data that a run leaves out if it goes on from this checkpoint, or from nothing. Raises
    DamagedCheckpoint."""
    made_by = manifest.attempt if manifest else 0
    if gone_back and gone_back[-1].attempt >= made_by:
        return gone_back[-1].skips
    try:
        return _SPANS.validate_python(manifest.state.get(SKIPS, []) if manifest else [])
    except ValidationError as error:
        raise DamagedCheckpoint(
            f"a checkpoint of attempt {made_by} says of the data left out: {first_problem(error)}",
            remedy="restore its manifest from a copy, or move it away: an earlier checkpoint is used then",
        ) from error


@dataclass(frozen=True)
class CheckpointFolder:
    """What is stored of one checkpoint, complete or not.

    Attributes:
        sizes: bytes of each object, by key.
    """

    mark: CheckpointName
    sizes: dict[str, int]

    @property
    def committed(self) -> bool:
        return self.mark.manifest in self.sizes


@dataclass(frozen=True)
class CheckpointRow:
    """One line of `maskfleet checkpoints list`.

    Attributes:
        bytes: stored for it.
        created: seconds since 1970; None if the manifest cannot be read.
        world_size: ranks that wrote it; None if the manifest cannot be read.
        abandoned: the run went on from an earlier checkpoint, so this one is not part of its history.
        problem: why the manifest cannot be read, if so.
    """

    step: int
    attempt: int
    bytes: int
    created: float | None
    world_size: int | None
    abandoned: bool
    problem: str | None


def folders(store: Store) -> list[CheckpointFolder]:
    """Everything stored of checkpoints, newest first, in one listing."""
    sizes: dict[CheckpointName, dict[str, int]] = {}
    for entry in store.list(ROOT):
        mark = CheckpointName.of(entry.key)
        if mark is not None:
            sizes.setdefault(mark, {})[entry.key] = entry.size
    return [CheckpointFolder(mark, sizes[mark]) for mark in sorted(sizes, reverse=True)]


def committed(store: Store) -> list[CheckpointName]:
    """The checkpoints that have a manifest, newest first, without those that the run went back past."""
    gone_back = rewinds(store)
    marks = [folder.mark for folder in folders(store) if folder.committed]
    return [mark for mark in marks if not left_behind(mark, gone_back)]


def read_manifest(store: Store, mark: CheckpointName) -> CheckpointManifest:
    """Raises DamagedCheckpoint if the manifest is missing or not what was written, and NewerFormat."""
    where = f"{store.uri}/{mark.manifest}"
    try:
        manifest = decode(store.get(mark.manifest), where)
    except KeyMissing as error:
        raise DamagedCheckpoint(f"{where} is missing", remedy="use another checkpoint") from error
    if manifest.mark != mark:
        raise DamagedCheckpoint(
            f"{where} is the manifest of step {manifest.step}, attempt {manifest.attempt}",
            remedy="move the folder back to its own name",
        )
    return manifest


def rows(store: Store) -> list[CheckpointRow]:
    """The run's checkpoints, newest first."""
    found = []
    gone_back = rewinds(store)
    lineage: tuple[LineageSegment, ...] | None = None
    for folder in folders(store):
        if not folder.committed:
            continue
        mark, size = folder.mark, sum(folder.sizes.values())
        try:
            manifest = read_manifest(store, mark)
        except (DamagedCheckpoint, NewerFormat) as error:
            found.append(
                CheckpointRow(
                    step=mark.step,
                    attempt=mark.attempt,
                    bytes=size,
                    created=None,
                    world_size=None,
                    abandoned=False,
                    problem=error.problem,
                )
            )
            continue
        abandoned = left_behind(mark, gone_back)
        if not abandoned:
            lineage = lineage or manifest.lineage
            abandoned = not on(lineage, mark)
        found.append(
            CheckpointRow(
                step=mark.step,
                attempt=mark.attempt,
                bytes=size,
                created=manifest.created,
                world_size=manifest.world_size,
                abandoned=abandoned,
                problem=None,
            )
        )
    return found


def on(lineage: tuple[LineageSegment, ...], mark: CheckpointName) -> bool:
    """Whether the checkpoint is part of the history. (An attempt commits at the step that it began with only at the
    run's first step; its segment then has no steps.)
    """
    return any(part.attempt == mark.attempt and part.start <= mark.step <= part.stop for part in lineage)
