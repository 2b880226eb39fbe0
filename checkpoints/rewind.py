"""Going back: which checkpoints a run has left behind, and which data it leaves out from then on.

    checkpoints/rewind-a000003.json    attempt 3 went back; created by conditional put, once

An attempt that finds its loss gone for good writes this and ends. Checkpoints that it or an attempt before it committed
after the one it names do not count any more, whichever of them are still stored; the next attempt goes on from there,
without the data that was read since. The records are kept for ever, and every manifest repeats the ranges left out.
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
        attempt: which attempt did; 0 for what was decided before the first.
        to: the checkpoint it goes on from; None for the run's first step.
        began: the step with which it went wrong.
        reached: steps done when it went back.
        cause: for people.
        skips: the ranges left out from then on, those of earlier rewinds included.
    """

    attempt: int
    to: CheckpointName | None
    began: int
    reached: int
    cause: str
    skips: tuple[Span, ...]


def record(store: Store, rewind: Rewind, attempt: Attempt) -> None:
    """Makes it so.

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
    """All of them, the oldest first.

    Raises DamagedCheckpoint if one cannot be read: without it the run would go on with what it went back from.
    """
    return [_read(store, key) for key in sorted(entry.key for entry in store.list(_PREFIX))]


def _read(store: Store, key: str) -> Rewind:
    data = store.get(key)
    try:
        body = unsealed(_SEALED, data)
        return Rewind.model_validate_json(data if body is None else body)  # the first ones had no digest
    except ValidationError as error:
        raise DamagedCheckpoint(
            f"{store.uri}/{key} cannot be read: {first_problem(error)}",
            remedy="restore it from a copy; if you delete it, the run goes on with what it went back from",
        ) from error


def left_behind(mark: CheckpointName, gone_back: Sequence[Rewind]) -> bool:
    """Whether the run went back past a checkpoint after it was made."""
    return any(
        mark.attempt <= rewind.attempt and (rewind.to is None or mark > rewind.to) for rewind in gone_back
    )


def skips(manifest: CheckpointManifest | None, gone_back: Sequence[Rewind]) -> tuple[Span, ...]:
    """The ranges that a run leaves out which goes on from a checkpoint, or from nothing. Raises DamagedCheckpoint."""
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
