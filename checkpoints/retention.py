"""Which checkpoints go, and how: so that at every instant a loadable one remains.

A deletion removes the manifest first, then the data: half-way, the checkpoint does not exist, and its files
are orphans that the next sweep finds.
"""

import logging
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from checkpoints.attempt import Attempt
from checkpoints.errors import DamagedCheckpoint
from checkpoints.layout import ROOT, Mark, Segment
from checkpoints.listing import Folder, folders, on, read_manifest
from checkpoints.rewind import left_behind, rewinds
from checkpoints.verify import verify
from data_service.store.base import Store

_log = logging.getLogger(__name__)

_DAY_S = 86400.0
_THREADS = 8


@dataclass(frozen=True)
class Tidied:
    """What `tidy` removed: checkpoints, and files of saves that were never committed."""

    deleted: tuple[Mark, ...]
    orphans: int


def expired(
    marks: Sequence[Mark],
    lineage: tuple[Segment, ...],
    *,
    keep_last: int,
    keep_every: int | None,
    way_back: int | None = None,
) -> list[Mark]:
    """The checkpoints to delete, oldest first.

    Kept are, of those on `lineage` (the newest one's): the newest `keep_last`, at least one; for each
    multiple of `keep_every` steps the first at or after it (checkpoints due by time fall between multiples);
    and, so that there is a way back from a loss gone bad, the newest of at most `way_back` steps and all after it,
    which come to be that later.
    What is not on the lineage was abandoned when the run went on from an earlier one.
    """
    history = sorted((mark for mark in marks if on(lineage, mark)), reverse=True)
    kept = set(history[: max(keep_last, 1)])
    if keep_every:
        first_of = {mark.step // keep_every: mark for mark in history}  # later entries, lower steps, win
        kept |= {mark for multiple, mark in first_of.items() if multiple > 0}
    if way_back is not None:
        young = sum(mark.step > way_back for mark in history)
        kept |= set(history[: young + 1])
    return sorted(set(marks) - kept)


def tidy(
    store: Store, attempt: Attempt, *, keep_last: int, keep_every: int | None, way_back: int | None = None
) -> Tidied:
    """Deletes checkpoints that have expired, and sweeps. One rank calls it, after a commit.

    Nothing is deleted unless the newest checkpoint is there with all its files.

    Raises:
        Superseded: a newer attempt has been claimed; nothing more is deleted.
        StoreError: the store does not answer; a later call goes on.
    """
    found, gone_back = folders(store), rewinds(store)
    marks = [folder.mark for folder in found if folder.committed]
    counting = [mark for mark in marks if not left_behind(mark, gone_back)]
    if not counting:
        return Tidied((), 0)
    try:
        newest = read_manifest(store, counting[0])
        problems = verify(store, newest, full=False)
    except DamagedCheckpoint as error:
        problems = [error.problem]
    if problems:
        _log.warning("deleting no checkpoints, because the newest is damaged: %s", "; ".join(problems))
        return Tidied((), 0)
    gone = expired(marks, newest.lineage, keep_last=keep_last, keep_every=keep_every, way_back=way_back)
    for folder in reversed(found):
        if folder.mark in gone:
            attempt.ensure_current()
            store.delete(folder.mark.manifest)
            _delete(store, folder.sizes)
    return Tidied(tuple(gone), sweep(store, attempt))


def sweep(store: Store, attempt: Attempt) -> int:
    """Deletes what saves never committed and deletions half done left; returns the number of files.

    Spared is what this attempt may still be writing: steps after its newest commit.
    """
    found = folders(store)
    own = [folder.mark.step for folder in found if folder.committed and folder.mark.attempt == attempt.number]
    reached = max(own, default=-1)
    over = [folder for folder in found if not folder.committed and _is_over(folder, attempt, reached)]
    attempt.ensure_current()
    for folder in over:
        _delete(store, folder.sizes)
    store.remove_leftovers(ROOT, older_than_s=_DAY_S)
    return sum(len(folder.sizes) for folder in over)


def _is_over(folder: Folder, attempt: Attempt, reached: int) -> bool:
    writer = folder.mark.attempt
    return writer < attempt.number or (writer == attempt.number and folder.mark.step < reached)


def _delete(store: Store, keys: Iterable[str]) -> None:
    with ThreadPoolExecutor(_THREADS) as pool:
        list(pool.map(store.delete, keys))
