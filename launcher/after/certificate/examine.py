"""Writes the certificate of a run, and compares every byte that the run keeps with it.

Damage does not stop the comparison: every problem is reported with its place.
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
    DIGEST_CHUNK_BYTES,
    SIGNATURE_KEY,
    Certificate,
    Digests,
    check_signature,
    decode_certificate,
    encode_certificate,
    extend_chain,
    sha256,
)
from launcher.progress import BYTES_UNIT, work
from launcher.runtime.preflight.releases import describe_torch_change
from launcher.runtime.run.segments import (
    EVENTS,
    METRICS,
    DamagedPack,
    Pack,
    list_segments,
    read_segments,
    segment_prefix,
)

_IMMUTABLE_PREFIXES = (  # key prefixes of objects and logs that no command changes once they are written
    f"{METRICS}/",
    f"{EVENTS}/",
    "attempts/",
    CHECKPOINTS_FOLDER,
    "removals/",
    "tokenizers/",
)
_UNCERTIFIED_PREFIXES = (  # key prefixes of objects that commands rewrite or delete, so no certificate lists them
    CERTIFICATE_KEY,
    SIGNATURE_KEY,
    "attempts/deaths.json",
    "attempts/stop.json",
    "tensorboard/",
    "trackers/",
    "tables/",
    "microbatch/",
    "baselines.json",
    "cache/",
)
_SKIPPED_SUFFIXES = (".heartbeat", ".jsonl")  # key suffixes: heartbeats change; `_hash_logs` hashes segments of logs


@dataclass
class CertificateCheck:
    """The result of comparing a run with its certificate. `contents`: digests of what the run keeps; `problems`: URIs,
    each with what is wrong there; `notes`: allowed differences, such as new records and deleted checkpoints."""

    contents: dict[str, Digests]
    problems: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_certificate(uri: str, public_key: Any = None) -> Certificate | None:
    """Return the certificate of the run at `uri`; None if it has none. `public_key`: key, from `read_key`, whose
    signature is required.

    Raises:
        CertificateError: it is damaged, of another version, or not signed by `public_key`.
        StoreError: the run cannot be read.
    """
    store = open_store(uri)
    data, where = _get_or_none(store, CERTIFICATE_KEY), f"{store.uri.rstrip('/')}/{CERTIFICATE_KEY}"
    if data is None:
        return None
    if public_key is not None:
        check_signature(data, _get_or_none(store, SIGNATURE_KEY), public_key, where)
    return decode_certificate(data, where)


def certify(uri: str, private_key: Any = None) -> tuple[Certificate | None, CertificateCheck]:
    """Compare the run at `uri` with its certificate. If there are problems, write nothing and return None; else write
    the extended certificate, signed with `private_key` if one is given, and return it. Changed settings and derived
    files are no problems. Raises as `compare_with_certificate`."""
    store, former = open_store(uri), read_certificate(uri)
    found = compare_with_certificate(uri, former, allow_mutable_changes=True)
    if found.problems:
        return None, found
    certificate = extend_chain(former, found.contents)
    data = encode_certificate(certificate)
    store.delete(SIGNATURE_KEY)  # the old signature does not cover the new certificate
    store.put(CERTIFICATE_KEY, data)
    if private_key is not None:
        store.put(SIGNATURE_KEY, private_key.sign(data))
    return certificate, found


def compare_with_certificate(
    uri: str, certificate: Certificate | None, *, allow_mutable_changes: bool = False
) -> CertificateCheck:
    """Hash everything that the run at `uri` keeps, and compare it with the certificate, if there is one.

    Args:
        allow_mutable_changes: whether changed settings and derived files count as notes, not as problems.

    Raises StoreError: the run cannot be read. CertificateError: as `read_certificate`.
    """
    store = open_store(uri)
    found = CertificateCheck(_hash_objects(store))
    _hash_logs(store, found)
    damaged_logs = {place for place, _ in found.problems}
    known, deleted = certificate.newest_digests if certificate else {}, set[CheckpointName]()
    for what, then in known.items():
        if what.startswith(_UNCERTIFIED_PREFIXES):  # certificates of older versions list some of these
            continue
        now, mark = found.contents.get(what, ()), CheckpointName.from_key(what)
        if then and mark is not None and mark.manifest_key not in found.contents:
            deleted.add(mark)
            continue
        place = f"{store.uri.rstrip('/')}/{what}"
        if place in damaged_logs:
            continue
        changes = [(place, change) for change in _digest_changes(what, then, now)]
        if allow_mutable_changes and not what.startswith(_IMMUTABLE_PREFIXES):
            found.notes += [f"{place}: {change}" for _, change in changes]
        else:
            found.problems += changes
    found.notes += [f"the checkpoint of step {mark.step} is no longer kept" for mark in sorted(deleted)]
    found.notes += _torch_version_changes(store)
    if new := sum(len(found.contents[what]) > len(known.get(what, ())) for what in found.contents):
        found.notes.append(f"{new:,} files and logs are new or have grown since the certificate was written")
    return found


def _torch_version_changes(store: Store) -> Iterator[str]:
    """Yield a line for each change of torch's version between kept checkpoints. Damaged manifests are left out, because
    the comparison of digests reports them."""
    kept: list[tuple[int, str]] = []
    with suppress(CheckpointError):
        for mark in reversed(list_committed(store)):
            with suppress(CheckpointError):
                kept.append((mark.step, read_manifest(store, mark).versions.get("torch", "")))
    for (step, before), (_, after) in pairwise(kept):
        if change := describe_torch_change(before, after):
            yield f"after step {step:,}: {change}"


def _digest_changes(key: str, certified_digests: Digests, current_digests: Digests) -> Iterator[str]:
    """Yield a text for each chunk of an object, or segment of a log (its key ends with /), that has changed."""
    log = key.endswith("/")
    for number, (before, after) in enumerate(zip_longest(certified_digests, current_digests)):
        start = number * DIGEST_CHUNK_BYTES
        place = f"segment {number}" if log else f"bytes {start} to {start + DIGEST_CHUNK_BYTES}"
        if before is not None and before != after:
            yield f"{place}: {'missing' if after is None else 'changed'}"
        elif before is None and not log:
            yield f"{place}: appended"


def _get_or_none(store: Store, key: str) -> bytes | None:
    try:
        return store.get(key)
    except KeyMissing:
        return None


def _hash_objects(store: Store) -> dict[str, Digests]:
    """Return the digests of the store's objects, without logs and objects that no certificate lists."""
    sizes = {
        entry.key: entry.size
        for entry in store.list()
        if not entry.key.startswith(_UNCERTIFIED_PREFIXES) and not entry.key.endswith(_SKIPPED_SUFFIXES)
    }
    with work("reading the run", sum(sizes.values()), BYTES_UNIT) as now:
        hashed = list(parallel_map(lambda key: _hash_object(store, key, sizes[key], now.advance), sorted(sizes)))
    return {key: found for key, found in zip(sorted(sizes), hashed, strict=True) if found is not None}


def _hash_object(store: Store, key: str, size: int, report_bytes: Callable[[int], None]) -> Digests | None:
    """Return the digests of an object; None if it was deleted or replaced since it was listed."""
    digests = []
    for start in range(0, max(size, 1), DIGEST_CHUNK_BYTES):
        length = min(DIGEST_CHUNK_BYTES, size - start)
        try:
            digests.append(sha256(store.get_range(key, start, length) if length else b""))
        except (KeyMissing, Truncated):
            return None
        report_bytes(length)
    return tuple(digests)


def _hash_logs(store: Store, check: CertificateCheck) -> None:
    """Add to `check` the digests of each log's segments, by the log's prefix, or the problem of a log with a damaged
    pack."""
    for folder in (METRICS, EVENTS):
        for attempt in list_segments(store, f"{folder}/"):
            prefix = segment_prefix(folder, attempt)
            try:
                check.contents[prefix] = tuple(_segment_digests(store, folder, attempt))
            except DamagedPack as error:
                check.problems.append((f"{store.uri.rstrip('/')}/{prefix}", error.problem))


def _segment_digests(store: Store, folder: str, attempt: int) -> Iterator[str]:
    """Yield the SHA-256 of each segment of an attempt's log once, even if it is also in a pack of segments."""
    after = -1
    for stretch, data in read_segments(store, folder, attempt):
        packed = Pack(store, stretch).segment_contents() if data is None else iter([(stretch.first, data)])
        for number, content in packed:
            if number > after:
                yield sha256(content)
                after = number
