"""Going back: which checkpoints a run has left behind, and which data it leaves out from then on.

    checkpoints/rewind-a000003.json    attempt 3 went back; created by conditional put, once

An attempt whose loss does not recover writes this record and ends. Checkpoints that were committed after the one named
in the record, by this or an earlier attempt, do not count any more, even if they are still stored. The next attempt
goes on from the named one, and leaves out the data that was read since. Records are kept for ever, and every later
manifest repeats the ranges left out.
"""

from collections.abc import Sequence

from pydantic import TypeAdapter, ValidationError

from checkpoints.attempt import Attempt
from checkpoints.errors import CheckpointError, DamagedCheckpoint
from checkpoints.layout import (
    ROOT,
    CheckpointManifest,
    CheckpointName,
    Strict,
    first_problem,
    refuse_newer,
    sealed,
    unsealed,
)
from data_service.store.base import Store

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
