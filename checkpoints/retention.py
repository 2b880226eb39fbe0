"""Decides which checkpoints are deleted, and in which order, so that a loadable one exists at every moment.

A deletion removes the manifest first, then the data. If it is interrupted, the checkpoint no longer exists, and the
next sweep deletes its files.

Stored bytes may decay without a change of size. So every deletion leaves, among the newest checkpoints that are kept,
at least one whose bytes this attempt has read and verified: the one that it resumed from, or else one that
`delete_expired` reads back. So one of every `keep_last` checkpoints is read back, by one rank, during training.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from checkpoints.attempt import Attempt
from checkpoints.errors import DamagedCheckpoint, NewerFormat
from checkpoints.layout import CheckpointManifest, CheckpointName, LineageSegment
from checkpoints.listing import CheckpointFolder, is_abandoned, is_on_lineage, list_folders, read_manifest, read_rewinds
from checkpoints.verify import verify
from data_service.store.base import Store, parallel_map

_log = logging.getLogger(__name__)

_NOTHING_DELETED = "no checkpoint is deleted, because the newest one cannot be read: %s"


@dataclass(frozen=True)
class DeletionReport:
    """The result of `delete_expired`.

    Attributes:
        deleted: checkpoints that were deleted.
        orphans: number of deleted files of saves that were never committed.
        proven: checkpoints whose bytes this attempt has read and verified; to be given to the next call.
    """

    deleted: tuple[CheckpointName, ...]
    orphans: int
    proven: frozenset[CheckpointName] = frozenset()


def expired_checkpoints(
    names: Sequence[CheckpointName],
    lineage: tuple[LineageSegment, ...],
    *,
    keep_last: int,
    keep_every: int | None,
    latest_rewind_step: int | None = None,
) -> list[CheckpointName]:
    """Return the checkpoints to delete, oldest first.

    Of the checkpoints on `lineage` (the newest checkpoint's lineage) these are kept:

    - the newest `keep_last`, at least one;
    - for each multiple of `keep_every` steps the first checkpoint at or after it (checkpoints that are written by the
      clock fall between multiples);
    - the newest checkpoint of at most `latest_rewind_step` steps, and all later ones, so that the run can be rewound if
      its loss diverges.

    Checkpoints that are not on the lineage were abandoned when the run continued from an earlier one.
    """
    history = sorted((name for name in names if is_on_lineage(lineage, name)), reverse=True)
    kept = set(history[: max(keep_last, 1)])
    if keep_every:
        # `history` is newest first, so the lowest step of each interval is set last and stays.
        first_of = {name.step // keep_every: name for name in history}
        kept |= {name for multiple, name in first_of.items() if multiple > 0}
    if latest_rewind_step is not None:
        young = sum(name.step > latest_rewind_step for name in history)
        kept |= set(history[: young + 1])
    return sorted(set(names) - kept)


def delete_expired(
    store: Store,
    attempt: Attempt,
    *,
    keep_last: int,
    keep_every: int | None,
    latest_rewind_step: int | None = None,
    proven: frozenset[CheckpointName] = frozenset(),
) -> DeletionReport:
    """Delete expired checkpoints, then `delete_orphans`. One rank calls this, after a commit.

    Nothing is deleted unless the newest checkpoint has all its files and one of the newest `keep_last` has been
    verified. If none of these is in `proven`, the newest checkpoint is read back now.

    `keep_last`, `keep_every`, `latest_rewind_step`: the rule, as in `expired_checkpoints`. `proven`: checkpoints that
    this attempt has verified, from the previous call.

    Raises:
        Superseded: a newer attempt has been claimed; nothing more is deleted.
        DamagedCheckpoint: the record of a rewind cannot be read; nothing is deleted.
        StoreError: the store does not answer; a later call continues the deletion.
    """
    found, rewinds = list_folders(store), read_rewinds(store)
    names = [folder.name for folder in found if folder.is_committed]
    counting = [name for name in names if not is_abandoned(name, rewinds)]
    newest = _read_newest_manifest(store, counting[0]) if counting else None
    if newest is None:
        return DeletionReport((), 0, proven)
    gone = expired_checkpoints(
        names,
        newest.lineage,
        keep_last=keep_last,
        keep_every=keep_every,
        latest_rewind_step=latest_rewind_step,
    )
    gone = [name for name in gone if not _has_newer_format(store, name)]
    proven = proven.intersection(names)
    if gone and proven.isdisjoint(_fallback_checkpoints(counting, gone, keep_last)):
        if not _is_good(store, newest, full=True):
            return DeletionReport((), 0, proven)
        proven |= {newest.name}
    for folder in reversed(found):
        if folder.name in gone:
            attempt.ensure_current()
            store.delete(folder.name.manifest_key)
            list(parallel_map(store.delete, folder.sizes))
    return DeletionReport(tuple(gone), delete_orphans(store, attempt), proven.difference(gone))


def _read_newest_manifest(store: Store, name: CheckpointName) -> CheckpointManifest | None:
    """Return the manifest of the newest checkpoint; None, with a warning, if it is damaged or files are missing."""
    try:
        newest = read_manifest(store, name)
    except (DamagedCheckpoint, NewerFormat) as error:
        _log.warning(_NOTHING_DELETED, error.problem)
        return None
    return newest if _is_good(store, newest, full=False) else None


def _has_newer_format(store: Store, name: CheckpointName) -> bool:
    """Return whether a newer version of Maskfleet wrote the checkpoint. It is not deleted, as we cannot read it."""
    try:
        read_manifest(store, name)
    except NewerFormat:
        return True
    except DamagedCheckpoint:
        pass
    return False


def _is_good(store: Store, manifest: CheckpointManifest, *, full: bool) -> bool:
    problems = verify(store, manifest, full=full)
    if problems:
        _log.warning(_NOTHING_DELETED, "; ".join(problems))
    return not problems


def _fallback_checkpoints(
    names: Sequence[CheckpointName], expired: Sequence[CheckpointName], keep_last: int
) -> list[CheckpointName]:
    """Return those of `names`, newest first, from which the run would continue if newer ones were damaged."""
    return [name for name in names if name not in expired][: max(keep_last, 1)]


def delete_orphans(store: Store, attempt: Attempt) -> int:
    """Delete files of saves that were never committed and of interrupted deletions; return their number. Also delete
    leftovers of writes, anywhere in the run, that are older than this attempt.

    Files of steps after this attempt's newest commit are kept, because this attempt may still be writing them.
    """
    found = list_folders(store)
    own = [folder.name.step for folder in found if folder.is_committed and folder.name.attempt == attempt.number]
    reached = max(own, default=-1)
    over = [folder for folder in found if not folder.is_committed and _is_orphan(folder, attempt, reached)]
    attempt.ensure_current()
    for folder in over:
        list(parallel_map(store.delete, folder.sizes))
    # Leftovers from before our claim belong to earlier attempts.
    store.remove_leftovers("", older_than_key=attempt.key)
    return sum(len(folder.sizes) for folder in over)


def _is_orphan(folder: CheckpointFolder, attempt: Attempt, last_committed_step: int) -> bool:
    writer = folder.name.attempt
    return writer < attempt.number or (writer == attempt.number and folder.name.step < last_committed_step)
