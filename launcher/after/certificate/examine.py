"""Writes the certificate of a run, and compares every byte that the run keeps with it.

Nothing stops at the first damage: each problem is named by the place where it lies, and the rest is compared.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.layout import CHECKPOINTS_FOLDER, CheckpointName
from checkpoints.listing import list_committed, read_manifest
from data_service.store.base import Store, parallel_map
from data_service.store.errors import KeyMissing, Truncated
from data_service.store.open import open_store
from launcher.after.certificate.chain import (
    CERTIFICATE_KEY,
    CHUNK_BYTES,
    SIGNATURE,
    Certificate,
    Digests,
    check_signature,
    decode,
    encode,
    extend_chain,
    sha256,
)
from launcher.progress import BYTES, work
from launcher.runtime.preflight.releases import torch_change
from launcher.runtime.run.segments import EVENTS, METRICS, DamagedPack, Pack, read, segment_prefix, stored

_IMMUTABLE_PREFIXES = (
    f"{METRICS}/",
    f"{EVENTS}/",
    "attempts/",
    CHECKPOINTS_FOLDER,
    "removals/",
    "tokenizers/",
)
_UNCERTIFIED_PREFIXES = (CERTIFICATE_KEY, SIGNATURE, "attempts/stop.json", "tensorboard/")
_SEPARATELY_HASHED_SUFFIXES = (".heartbeat", ".jsonl")  # segments of logs are hashed separately


@dataclass
class Examination:
    """What a run keeps, compared with its certificate. `problems`: places (URIs), and what is wrong there; `notes`:
    what differs and may, as new records and commits that are no longer kept, and where torch was changed."""

    contents: dict[str, Digests]
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_certificate(uri: str, key: Any = None) -> Certificate | None:
    """Return the certificate of the run at `uri`; None if it has none. `key`: what `read_key` gives, the public key
    that must have signed it.

    Raises:
        CertificateError: it is damaged, of another version, or not signed by `key`.
        StoreError: the run cannot be read.
    """
    store = open_store(uri)
    data, where = _get(store, CERTIFICATE_KEY), f"{store.uri.rstrip('/')}/{CERTIFICATE_KEY}"
    if data is None:
        return None
    if key is not None:
        check_signature(data, _get(store, SIGNATURE), key, where)
    return decode(data, where)


def certify(uri: str, key: Any = None) -> tuple[Certificate | None, Examination]:
    """Compare the run at `uri` with its certificate, and continue that; with problems nothing is written, and None is
    returned. Settings and derived files may have changed. `key` signs the certificate. Raises as
    `compare_with_certificate`."""
    store, former = open_store(uri), read_certificate(uri)
    found = compare_with_certificate(uri, former, may_change=True)
    if found.problems:
        return None, found
    certificate = extend_chain(former, found.contents)
    data = encode(certificate)
    store.delete(SIGNATURE)  # the old signature does not cover the new certificate
    store.put(CERTIFICATE_KEY, data)
    if key is not None:
        store.put(SIGNATURE, key.sign(data))
    return certificate, found


def compare_with_certificate(
    uri: str, certificate: Certificate | None, *, may_change: bool = False
) -> Examination:
    """Hash all that the run at `uri` keeps, and compare it with the certificate, if there is one.

    Args:
        may_change: whether other settings and derived files than the certificate's are notes, not problems.

    Raises StoreError: the run cannot be read. CertificateError: as `read_certificate`.
    """
    store = open_store(uri)
    found = Examination(_hash_objects(store))
    try:
        found.contents |= _hash_logs(store)
    except DamagedPack as error:
        found.problems.append((uri, error.problem))
    known, deleted = certificate.newest_digests if certificate else {}, set[CheckpointName]()
    for what, then in known.items():
        now, mark = found.contents.get(what, ()), CheckpointName.from_key(what)
        if then and mark is not None and mark.manifest not in found.contents:
            deleted.add(mark)
            continue
        changes = [(f"{store.uri.rstrip('/')}/{what}", change) for change in _changes(what, then, now)]
        if may_change and not what.startswith(_IMMUTABLE_PREFIXES):
            found.notes += [f"{place}: {change}" for place, change in changes]
        else:
            found.problems += changes
    found.notes += [f"the commit of step {mark.step} is no longer kept" for mark in sorted(deleted)]
    found.notes += _torch_changes(store)
    if new := sum(len(found.contents[what]) > len(known.get(what, ())) for what in found.contents):
        found.notes.append(f"{new:,} files and logs are new or longer since the certificate")
    return found


def _torch_changes(store: Store) -> Iterator[str]:
    """Yield a line for each change of torch between checkpoints that are kept. A damaged manifest ends this: that it is
    damaged is found by its digest."""
    with suppress(CheckpointError):
        kept = [(mark.step, read_manifest(store, mark).versions) for mark in reversed(list_committed(store))]
        for (step, before), (_, after) in pairwise(kept):
            if change := torch_change(before.get("torch", ""), after.get("torch", "")):
                yield f"after step {step:,}: {change}"


def _changes(what: str, then: Digests, now: Digests) -> Iterator[str]:
    log = what.endswith("/")
    for number, (before, after) in enumerate(zip_longest(then, now)):
        start = number * CHUNK_BYTES
        place = f"segment {number}" if log else f"bytes {start} to {start + CHUNK_BYTES}"
        if before is not None and before != after:
            yield f"{place}: {'missing' if after is None else 'changed'}"
        elif before is None and not log:
            yield f"{place}: appended"


def _get(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key)
    except KeyMissing:
        return None


def _hash_objects(store: Store) -> dict[str, Digests]:
    """Return the digests of the store's objects but for logs and what a running command writes again and again."""
    sizes = {
        entry.key: entry.size
        for entry in store.list()
        if not entry.key.startswith(_UNCERTIFIED_PREFIXES)
        and not entry.key.endswith(_SEPARATELY_HASHED_SUFFIXES)
    }
    with work("reading the run", sum(sizes.values()), BYTES) as now:
        hashed = list(
            parallel_map(lambda key: _hash_object(store, key, sizes[key], now.advance), sorted(sizes))
        )
    return {key: found for key, found in zip(sorted(sizes), hashed, strict=True) if found is not None}


def _hash_object(store: Store, key: str, size: int, report: Callable[[int], None]) -> Digests | None:
    """Return the digests of an object; None if it was deleted or replaced since it was listed."""
    digests = []
    for start in range(0, max(size, 1), CHUNK_BYTES):
        length = min(CHUNK_BYTES, size - start)
        try:
            digests.append(sha256(store.get_range(key, start, length) if length else b""))
        except (KeyMissing, Truncated):
            return None
        report(length)
    return tuple(digests)


def _hash_logs(store: Store) -> dict[str, Digests]:
    """Return the digests of every segment, packed or not, by the log's prefix. Raises DamagedPack."""
    return {
        segment_prefix(folder, attempt): tuple(_segments(store, folder, attempt))
        for folder in (METRICS, EVENTS)
        for attempt in stored(store, f"{folder}/")
    }


def _segments(store: Store, folder: str, attempt: int) -> Iterator[str]:
    after = -1
    for stretch, data in read(store, folder, attempt):
        packed = Pack(store, stretch).contents() if data is None else iter([(stretch.first, data)])
        for number, content in packed:
            if number > after:
                yield sha256(content)
                after = number
