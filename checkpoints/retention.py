"""Which checkpoints go, and how: so that at every instant a loadable one remains.

A deletion removes the manifest first, then the data: half-way, the checkpoint does not exist, and its files
are orphans that the next sweep finds.
"""

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass

from checkpoints.attempt import Attempt
from checkpoints.layout import DATA, Segment, data_prefix, manifest_key
from checkpoints.listing import Found, manifests, on
from checkpoints.verify import verify
from data_service.store.base import Store

_log = logging.getLogger(__name__)

_DAY_S = 86400.0


@dataclass(frozen=True, order=True)
class Mark:
    """A checkpoint as retention sees it. Newer ones compare greater."""

    attempt: int
    step: int


@dataclass(frozen=True)
class Tidied:
    """What `tidy` removed: checkpoints by step, and files that belonged to none."""

    deleted: tuple[int, ...]
    orphans: int


def expired(
    marks: Sequence[Mark], lineage: tuple[Segment, ...], *, keep_last: int, keep_every: int | None
) -> list[Mark]:
    """The checkpoints to delete, oldest first.

    Kept are, of those on the newest one's lineage: the newest `keep_last`, and for each multiple of
    `keep_every` steps the first at or after it (checkpoints due by time fall between multiples). What is not
    on the lineage was abandoned when the run went on from an earlier one.
    """
    history = sorted((mark for mark in marks if on(lineage, mark.attempt, mark.step)), reverse=True)
    kept = set(history[: max(keep_last, 1)])
    if keep_every:
        first_of = {mark.step // keep_every: mark for mark in history}  # later entries, lower steps, win
        kept |= {mark for multiple, mark in first_of.items() if multiple > 0}
    return sorted(set(marks) - kept)


def tidy(store: Store, attempt: Attempt, *, keep_last: int, keep_every: int | None) -> Tidied:
    """Deletes what has expired and sweeps what belongs to no checkpoint. One rank calls it, after a commit.

    Nothing is deleted unless one of the checkpoints that stay is there with all its files.

    Raises:
        Superseded: a newer attempt has been claimed; nothing more is deleted.
        StoreError: the store does not answer; a later call goes on.
    """
    found = manifests(store)
    if not found.good:
        return Tidied((), 0)
    marks = [Mark(manifest.attempt, manifest.step) for manifest in found.good]
    gone = expired(marks, found.good[0].lineage, keep_last=keep_last, keep_every=keep_every)
    staying = [manifest for manifest in found.good if Mark(manifest.attempt, manifest.step) not in gone]
    if not any(not verify(store, manifest, full=False) for manifest in staying):
        _log.warning("none of the newest checkpoints of %s is complete: deleting none", store.uri)
        return Tidied((), 0)
    for mark in gone:
        attempt.ensure_current()
        store.delete(manifest_key(mark.step))
        _delete_data(store, attempt, data_prefix(mark.attempt, mark.step))
    return Tidied(tuple(mark.step for mark in gone), sweep(store, attempt))


def sweep(store: Store, attempt: Attempt) -> int:
    """Deletes data of saves that were never committed, or half deleted; returns the number of files.

    Spared are what newer saves of this attempt may still be writing, and the data of manifests that cannot be
    read (which somebody may want to repair).
    """
    found = manifests(store)
    referenced = {data_prefix(manifest.attempt, manifest.step) for manifest in found.good}
    count = 0
    for prefix in sorted({_folder(entry.key) for entry in store.list(DATA)} - referenced):
        if _is_orphan(prefix, attempt, found):
            count += _delete_data(store, attempt, prefix)
    attempt.ensure_current()
    store.remove_leftovers(DATA, older_than_s=_DAY_S)
    return count


def _is_orphan(prefix: str, attempt: Attempt, found: Found) -> bool:
    name = re.fullmatch(rf"{DATA}a(\d+)-step-(\d+)/", prefix)
    if name is None:
        return False
    writer, step = int(name[1]), int(name[2])
    if step in [broken.step for broken in found.unreadable]:
        return False
    committed = max(
        (manifest.step for manifest in found.good if manifest.attempt == attempt.number), default=-1
    )
    return writer < attempt.number or (writer == attempt.number and step < committed)


def _folder(key: str) -> str:
    return key[: key.index("/", len(DATA)) + 1] if "/" in key[len(DATA) :] else key


def _delete_data(store: Store, attempt: Attempt, prefix: str) -> int:
    entries = list(store.list(prefix))
    for entry in entries:
        attempt.ensure_current()
        store.delete(entry.key)
    return len(entries)
