"""Verifies stored checkpoints against their manifests, copies a checkpoint into another run, and finds the newest
checkpoint without damage, on which all ranks agree before any of them reads its tensors (`load.py`).

Every read is checked: no caller gets bytes that do not match the manifest's hash. A copy is verified again after it was
written.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from checkpoints.errors import CheckpointError, DamagedCheckpoint, NewerFormat, NoGoodCheckpoint
from checkpoints.gather import Peers, broadcast_or_raise, gather_or_raise
from checkpoints.layout import (
    CheckpointManifest,
    CheckpointName,
    LineageSegment,
    RankFile,
    encode_manifest,
    find_problems,
)
from checkpoints.listing import list_committed, read_manifest
from data_service.processes import temporary_root
from data_service.store.base import Store, read_verified
from data_service.store.errors import KeyMissing, OutOfSpace, Truncated

_CONCURRENT_REQUESTS = 8  # requests at a time, because an object store takes tens of milliseconds to answer one


def read_chunk(store: Store, file: RankFile, index: int) -> bytes:
    """Return chunk `index` of a file: its bytes from index * file.chunk on.

    Raises:
        DamagedCheckpoint: the file is missing or too short, or the chunk does not match its hash.
    """
    start = index * file.chunk
    length = min(file.chunk, file.size - start)
    where = f"{store.uri}/{file.key}"
    remedy = "an earlier checkpoint is used instead; `maskfleet checkpoints verify` lists all damage"
    wrong = DamagedCheckpoint(f"{where} does not match its hash in bytes {start} to {start + length}", remedy=remedy)
    try:
        return read_verified(
            store, file.key, start=start, length=length, expected=file.hashes[index], error_on_mismatch=wrong
        )
    except (KeyMissing, Truncated) as error:
        raise DamagedCheckpoint(error.problem, remedy=remedy) from error


@dataclass(frozen=True)
class Verification:
    """The result of verifying the checkpoint `name`; `problems` is empty for a good one."""

    name: CheckpointName
    problems: tuple[str, ...]


ReportBytes = Callable[[int], None]
"""A function that is called, from several threads, with the number of bytes that were just read."""


def _ignore_progress(read_bytes: int) -> None: ...


def verify_all(
    store: Store,
    *,
    full: bool = True,
    begin: Callable[[int, int], ReportBytes] = lambda step, size: _ignore_progress,
) -> Iterator[Verification]:
    """Verify every checkpoint of the run in `store`, newest first; yield the result of each.

    `full`: as for `verify`. `begin`: function that is called before each checkpoint with its step and its size in
    bytes, and returns the function to which progress is reported.
    """
    for name in list_committed(store):
        try:
            manifest = read_manifest(store, name)
            report = begin(name.step, sum(file.size for file in manifest.files))
            found = verify(store, manifest, full=full, report=report)
        except (DamagedCheckpoint, NewerFormat) as error:
            found = [error.problem]
        yield Verification(name, tuple(found))


def verify(
    store: Store, manifest: CheckpointManifest, *, full: bool = True, report: ReportBytes = _ignore_progress
) -> list[str]:
    """Return the problems of a checkpoint; empty for a good one. Unless `full`, only the files' sizes are checked."""
    wrong = find_problems(manifest)
    return wrong + verify_files(store, manifest, manifest.files, full=full, report=report)


def verify_files(
    store: Store,
    manifest: CheckpointManifest,
    files: Sequence[RankFile],
    *,
    full: bool,
    report: ReportBytes = _ignore_progress,
) -> list[str]:
    """Return the problems of some of the checkpoint's files. Each problem names its file."""
    sizes = {entry.key: entry.size for entry in store.list(manifest.name.folder)}
    wrong = []
    for file in files:
        where = f"{store.uri}/{file.key}"
        if file.key not in sizes:
            wrong.append(f"{where} is missing")
        elif sizes[file.key] != file.size:
            wrong.append(f"{where} has {sizes[file.key]} bytes instead of {file.size}")
        elif full:
            wrong += _damaged_chunks(store, file, report)
    return wrong


def _damaged_chunks(store: Store, file: RankFile, report: ReportBytes) -> list[str]:
    def check_chunk(index: int) -> str | None:
        try:
            read_chunk(store, file, index)
        except DamagedCheckpoint as error:
            return error.problem
        finally:
            report(min(file.chunk, file.size - index * file.chunk))
        return None

    with ThreadPoolExecutor(_CONCURRENT_REQUESTS) as pool:
        return [problem for problem in pool.map(check_chunk, range(len(file.hashes))) if problem is not None]


COPIED_ATTEMPT = 0  # attempt number of a copied checkpoint: below every attempt of the run
_FILES_AT_ONCE = 4  # files copied at the same time, each through the temporary folder


def copy_checkpoint(source: Store, manifest: CheckpointManifest, target: Store, now: float) -> CheckpointManifest:
    """Copy a checkpoint of the run in `source` into the run in `target`, as its first one; return the new manifest.

    The copy belongs to attempt `COPIED_ATTEMPT`. As in any save, the manifest is written last, so an interrupted copy
    may be repeated. `now`: time of the copy (seconds since 1970).

    Raises:
        DamagedCheckpoint: bytes that were read, or the copy that was written, do not match their hashes.
        CheckpointError: `target` holds another checkpoint of this name.
        OutOfSpace: the temporary folder or a store is full.
        StoreError: a store does not answer.
    """
    name = CheckpointName(COPIED_ATTEMPT, manifest.step)
    files = tuple(file.model_copy(update={"key": name.file_key(rank)}) for rank, file in enumerate(manifest.files))
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        list(pool.map(lambda file, to: _copy_file(source, file, target, to), manifest.files, files))
    lineage = (LineageSegment(attempt=COPIED_ATTEMPT, start=0, stop=manifest.step),)
    copied = manifest.model_copy(update={"attempt": COPIED_ATTEMPT, "files": files, "lineage": lineage, "created": now})
    wrong = verify(target, copied)
    if wrong:
        raise DamagedCheckpoint(
            f"the copy in {target.uri} does not match what was written: {'; '.join(wrong)}",
            remedy="copy it again",
        )
    if target.put_if_absent(name.manifest_key, encode_manifest(copied)):
        return copied
    if read_manifest(target, name).model_copy(update={"created": now}) != copied:
        raise CheckpointError(
            f"{target.uri}/{name.manifest_key} exists already and is another checkpoint",
            remedy="copy to another place",
        )
    return copied


def _copy_file(source: Store, file: RankFile, target: Store, target_file: RankFile) -> None:
    """Copy one file through a temporary local file, because it may be larger than this machine's memory."""
    with tempfile.NamedTemporaryFile(prefix="maskfleet-copy-", dir=temporary_root()) as local:
        for index in range(len(file.hashes)):
            chunk = read_chunk(source, file, index)
            try:
                local.write(chunk)
                local.flush()
            except OSError as error:
                raise OutOfSpace.for_uri(local.name, error.strerror or str(error)) from error
        target.put_file(target_file.key, Path(local.name))


_NAMES_TYPE = TypeAdapter(list[CheckpointName])  # converts the committed checkpoints
_MANIFEST_TYPE: TypeAdapter[CheckpointManifest | str] = TypeAdapter(CheckpointManifest | str)  # str: its problem
_PROBLEMS_TYPE = TypeAdapter(list[list[str]])  # converts the problems that each rank found


@dataclass(frozen=True)
class GoodCheckpoint:
    """The checkpoint to resume from, and why each newer one cannot be used: in `passed_over` a line for each, with its
    name and its problems."""

    manifest: CheckpointManifest
    passed_over: tuple[str, ...]


def find_newest_good(
    store: Store, peers: Peers, *, full: bool = True, only: CheckpointName | None = None
) -> GoodCheckpoint | None:
    """Return the newest checkpoint without damage; None if the run has no checkpoint. `only`: the only checkpoint to
    consider.

    This is a collective: all ranks call it and get the same answer. Every rank verifies its share of the files: their
    sizes and, if `full`, all their bytes.

    Raises:
        NoGoodCheckpoint: the run has checkpoints, and all of them are damaged.
        NewerFormat: a newer version of Maskfleet wrote a checkpoint, and none after it can be used. This version must
            not continue from an older one.
        StoreError: the store did not answer on some rank. All ranks raise it, so none is left waiting.
    """
    passed_over: list[str] = []
    for name in [only] if only else broadcast_or_raise(peers, lambda: list_committed(store), _NAMES_TYPE):
        manifest = _read_manifest_once(store, name, peers)
        if isinstance(manifest, str):
            wrong = [manifest]
        elif not (wrong := _verify_on_all_ranks(store, manifest, peers, full)):
            return GoodCheckpoint(manifest, tuple(passed_over))
        passed_over.append(f"step {name.step} (attempt {name.attempt}): {'; '.join(wrong)}")
    if not passed_over:
        return None
    raise NoGoodCheckpoint(
        f"{store.uri} has checkpoints, but none can be loaded:\n    " + "\n    ".join(passed_over),
        remedy="restore the files named above from a copy, or start a new run from an older export",
    )


def _read_manifest_once(store: Store, name: CheckpointName, peers: Peers) -> CheckpointManifest | str:
    """Read the manifest on rank 0; return it, or what is wrong with it, on all ranks."""

    def read_manifest_or_problem() -> CheckpointManifest | str:
        try:
            return read_manifest(store, name)
        except DamagedCheckpoint as error:
            return error.problem

    return broadcast_or_raise(peers, read_manifest_or_problem, _MANIFEST_TYPE)


def _verify_on_all_ranks(store: Store, manifest: CheckpointManifest, peers: Peers, full: bool) -> list[str]:
    share = manifest.files[peers.rank :: peers.world]
    answers = gather_or_raise(peers, lambda: list(verify_files(store, manifest, share, full=full)))
    return [problem for answer in _PROBLEMS_TYPE.validate_python(answers) for problem in answer]
