"""Packs segments of metrics: the records of a million steps are then dozens of objects, not tens of thousands.

    1. The pack is created under its own name, by conditional put. From then on readers use the pack.
    2. The packed segments are deleted.

After a crash between these two steps, readers ignore the remaining segments. They are deleted later if their bytes are
those in the pack. A pack holds consecutive segments of one attempt. If an attempt that was wrongly believed dead writes
late, its segment stays a separate object, and no pack changes.
"""

import logging
import threading

from data_service.store.base import Store, parallel_map
from data_service.store.errors import KeyMissing, StoreError
from launcher.errors import RunError
from launcher.runtime.run.segments import (
    MAX_PACK_BYTES,
    METRICS,
    Pack,
    SegmentRange,
    list_segments,
    make_pack,
    pack_key,
    segment_prefix,
)

_log = logging.getLogger(__name__)

MAX_PACK_SEGMENTS = 512  # four hours of segments, at one every 30 seconds


def pack_older(store: Store, attempt: int, closing: threading.Event) -> None:
    """Pack the metrics of all attempts before `attempt` (`pack_attempt`)."""
    try:
        found = list_segments(store, f"{METRICS}/")
    except StoreError as error:
        _log.warning("segments cannot be listed, so none are packed: %s", error.problem)
        return
    for number, stretches in found.items():
        if number < attempt and sum(not stretch.packed for stretch in stretches) > 1:
            pack_attempt(store, number, closing, ended=True)


def pack_attempt(store: Store, attempt: int, closing: threading.Event, *, ended: bool) -> None:
    """Pack an attempt's metrics until no segments are left to pack, or `closing` is set. `ended`: as in `pack_once`.
    Errors are only logged, because a run can be read without packs."""
    try:
        while not closing.is_set() and pack_once(store, attempt, ended=ended):
            pass
    except (StoreError, RunError) as error:
        _log.warning("segments of attempt %d are not packed yet: %s", attempt, error.problem)


def pack_once(store: Store, attempt: int, *, ended: bool, most_segments: int = MAX_PACK_SEGMENTS) -> bool:
    """Make one pack of an attempt's metrics. Return whether there were segments to pack.

    Args:
        ended: whether the attempt has ended. If not, only full packs are made.
        most_segments: number of segments of a full pack.

    Raises:
        StoreError: the store cannot be read or written.
        DamagedPack: an earlier pack of the attempt cannot be read.
        RunError: a newer version wrote some of the attempt's records, so nothing was changed.
    """
    found = list_segments(store, segment_prefix(METRICS, attempt)).get(attempt, [])
    packs = [stretch for stretch in found if stretch.packed]
    single = [stretch for stretch in found if not stretch.packed]
    for stretch in packs:
        _delete_packed_segments(store, stretch, [one for one in single if stretch.first <= one.first <= stretch.last])
    free = [one for one in single if not any(pack.first <= one.first <= pack.last for pack in packs)]
    chosen, full = _choose_segments(free, most_segments)
    if len(chosen) < 2 or not (ended or full):
        return False
    try:
        contents = list(parallel_map(lambda stretch: store.get(stretch.key), chosen))
    except KeyMissing:
        return False  # another process has just packed them
    first, last = chosen[0].first, chosen[-1].last
    key = pack_key(METRICS, attempt, first, last)
    made = make_pack(first, contents, [stretch.key for stretch in chosen])
    if store.put_if_absent(key, made):
        for stretch in chosen:
            store.delete(stretch.key)
    else:
        _delete_packed_segments(store, SegmentRange(first, last, key, store.size(key) or 0), chosen)
    return True


def _choose_segments(unpacked: list[SegmentRange], most_segments: int) -> tuple[list[SegmentRange], bool]:
    """Return the first two or more segments with consecutive numbers (if there are none, fewer), and whether they fill
    a pack."""
    chosen: list[SegmentRange] = []
    size = 0
    for stretch in unpacked:
        if chosen and stretch.first != chosen[-1].last + 1:
            if len(chosen) > 1:
                return chosen, False
            chosen, size = [], 0
        chosen.append(stretch)
        size += stretch.size
        if len(chosen) > 1 and (len(chosen) == most_segments or size >= MAX_PACK_BYTES):
            return chosen, True
    return chosen, False


def _delete_packed_segments(store: Store, pack_range: SegmentRange, segments: list[SegmentRange]) -> None:
    """Delete those of `segments` whose bytes are the same in the pack `pack_range`."""
    if not segments:
        return
    inside = dict(Pack(store, pack_range).segment_contents())
    for stretch in segments:
        try:
            same = store.get(stretch.key) == inside[stretch.first]
        except KeyMissing:
            continue
        if same:
            store.delete(stretch.key)
        else:
            _log.warning("%s/%s differs from its copy in %s", store.uri, stretch.key, pack_range.key)
