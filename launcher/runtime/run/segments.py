"""Where a run's records lie: segments, numbered for each attempt, and packs, each of which holds many of them.

    metrics/a000002/00000007.jsonl             segment 7 of attempt 2: JSON lines
    metrics/a000002/00000000-00000511.npz      segments 0 to 511 of it, in one object (`launcher.runtime.run.packs`)

A segment's bytes never change, and only its own attempt writes it, so a segment that lies there twice, in a pack and
by itself, is the same segment: it is read once, from the pack.
"""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice

from data_service.store.base import Store
from data_service.store.errors import KeyMissing

METRICS = "metrics"
EVENTS = "events"

_READERS = 16  # concurrent gets: segments are small, so many of them on S3 are bound by latency
_AT_ONCE = 64  # segments in memory
_RELISTINGS = 20  # of an attempt whose segments go into packs while they are read
_KEY = re.compile(r"\w+/a(\d{6,12})/(\d{8,12})(?:\.jsonl|-(\d{8,12})\.npz)")


@dataclass(frozen=True)
class Stretch:
    """One object: segments `first` to `last` of an attempt. `size` in bytes."""

    first: int
    last: int
    key: str
    size: int

    @property
    def packed(self) -> bool:
        return self.key.endswith(".npz")


def segment_prefix(folder: str, attempt: int) -> str:
    return f"{folder}/a{attempt:06d}/"


def segment_key(folder: str, attempt: int, number: int) -> str:
    """An attempt's segments are numbered from 0, without a gap."""
    return f"{segment_prefix(folder, attempt)}{number:08d}.jsonl"


def pack_key(folder: str, attempt: int, first: int, last: int) -> str:
    return f"{segment_prefix(folder, attempt)}{first:08d}-{last:08d}.npz"


def stored(store: Store, prefix: str) -> dict[int, list[Stretch]]:
    """What lies below a prefix, by attempt, in order: segments and packs, including segments that are in a pack too.

    Lists twice. A segment may be packed while the first listing is under way: then that listing can miss both, the
    segment because it was deleted, the pack because it came later. The second listing finds the pack.
    """
    entries = {entry.key: entry for _ in range(2) for entry in store.list(prefix)}
    found: dict[int, list[Stretch]] = {}
    for entry in entries.values():
        if match := _KEY.fullmatch(entry.key):
            first = int(match[2])
            stretch = Stretch(first, int(match[3] or first), entry.key, entry.size)
            found.setdefault(int(match[1]), []).append(stretch)
    return {attempt: sorted(found[attempt], key=_order) for attempt in sorted(found)}


def once(stretches: list[Stretch], after: int = -1) -> list[Stretch]:
    """Of what is stored of an attempt, the objects that hold each segment after number `after`, none needlessly.

    Packs may overlap where two starts packed at the same time: a reader leaves out segments that it has read.
    """
    chosen = []
    for stretch in sorted(stretches, key=_order):
        if stretch.last > after:
            chosen.append(stretch)
            after = stretch.last
    return chosen


def read(
    store: Store, folder: str, attempt: int, stretches: list[Stretch] | None = None, after: int = -1
) -> Iterator[tuple[Stretch, bytes | None]]:
    """An attempt's objects in order, each segment after number `after` in one of them: segments with their bytes, packs
    with None. `stretches`: of a listing. One that goes into a pack meanwhile is found there. Raises StoreError.
    """
    for _ in range(_RELISTINGS):
        if stretches is None:
            stretches = stored(store, segment_prefix(folder, attempt)).get(attempt, [])
        try:
            for stretch, data in _contents(store, once(stretches, after)):
                yield stretch, data
                after = stretch.last
            return
        except KeyMissing as error:
            stretches, missing = None, error
    raise missing


def _order(stretch: Stretch) -> tuple[int, int]:
    return stretch.first, -stretch.last


def _contents(store: Store, stretches: list[Stretch]) -> Iterator[tuple[Stretch, bytes | None]]:
    remaining = iter(stretches)
    if len(stretches) <= 1:  # the usual look at what is new
        yield from ((stretch, _get(store, stretch)) for stretch in stretches)
        return
    with ThreadPoolExecutor(_READERS) as pool:
        while batch := list(islice(remaining, _AT_ONCE)):
            yield from zip(batch, pool.map(lambda stretch: _get(store, stretch), batch), strict=True)


def _get(store: Store, stretch: Stretch) -> bytes | None:
    return None if stretch.packed else store.get(stretch.key)
