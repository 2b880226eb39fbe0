"""Whether a stored checkpoint is what its manifest says, and the copy of one into another run.

Every read is checked: no caller gets bytes that do not match the manifest's hash. A copy is checked again after it was
written.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from checkpoints.errors import CheckpointError, DamagedCheckpoint, NewerFormat
from checkpoints.layout import CheckpointManifest, CheckpointName, File, LineageSegment, encode, problems
from checkpoints.listing import committed, read_manifest
from data_service.store.base import Store, read_verified
from data_service.store.errors import KeyMissing, OutOfSpace, Truncated

_THREADS = 8  # requests at once: object stores answer one in tens of milliseconds


def read_chunk(store: Store, file: File, index: int) -> bytes:
    """Chunk `index` of a file: bytes from index * file.chunk on.

    Raises:
        DamagedCheckpoint: the file is missing, too short, or holds other bytes there.
    """
    start = index * file.chunk
    length = min(file.chunk, file.size - start)
    where = f"{store.uri}/{file.key}"
    remedy = "see `maskfleet checkpoints verify`; an earlier checkpoint is used instead"
    wrong = DamagedCheckpoint(
        f"{where} does not match its hash in bytes {start} to {start + length}", remedy=remedy
    )
    try:
        return read_verified(
            store, file.key, start=start, length=length, expected=file.hashes[index], otherwise=wrong
        )
    except (KeyMissing, Truncated) as error:
        raise DamagedCheckpoint(error.problem, remedy=remedy) from error


@dataclass(frozen=True)
class Verification:
    """What verification found; `problems` is empty for a good checkpoint."""

    mark: CheckpointName
    problems: tuple[str, ...]


ReportBytes = Callable[[int], None]
"""Is called, by several threads, as bytes were read."""


def _ignore(read: int) -> None: ...


def verify_all(
    store: Store, *, full: bool = True, begin: Callable[[int, int], ReportBytes] = lambda step, size: _ignore
) -> Iterator[Verification]:
    """Verifies every checkpoint of the run in `store`, newest first, one at a time. `begin` hears of each, its step and
    its bytes, and gives what is called as they are read."""
    for mark in committed(store):
        try:
            manifest = read_manifest(store, mark)
            report = begin(mark.step, sum(file.size for file in manifest.files))
            found = verify(store, manifest, full=full, report=report)
        except (DamagedCheckpoint, NewerFormat) as error:
            found = [error.problem]
        yield Verification(mark, tuple(found))


def verify(
    store: Store, manifest: CheckpointManifest, *, full: bool = True, report: ReportBytes = _ignore
) -> list[str]:
    """What is wrong with the checkpoint. Not `full`: only whether its files exist, with the right sizes."""
    wrong = problems(manifest)
    return wrong + verify_files(store, manifest, manifest.files, full=full, report=report)


def verify_files(
    store: Store,
    manifest: CheckpointManifest,
    files: Sequence[File],
    *,
    full: bool,
    report: ReportBytes = _ignore,
) -> list[str]:
    """What is wrong with some of the checkpoint's files, each problem naming the file."""
    sizes = {entry.key: entry.size for entry in store.list(manifest.mark.folder)}
    wrong = []
    for file in files:
        where = f"{store.uri}/{file.key}"
        if file.key not in sizes:
            wrong.append(f"{where} is missing")
        elif sizes[file.key] != file.size:
            wrong.append(f"{where} has {sizes[file.key]} bytes instead of {file.size}")
        elif full:
            wrong += _damaged(store, file, report)
    return wrong


def _damaged(store: Store, file: File, report: ReportBytes) -> list[str]:
    def check(index: int) -> str | None:
        try:
            read_chunk(store, file, index)
        except DamagedCheckpoint as error:
            return error.problem
        finally:
            report(min(file.chunk, file.size - index * file.chunk))
        return None

    with ThreadPoolExecutor(_THREADS) as pool:
        return [problem for problem in pool.map(check, range(len(file.hashes))) if problem is not None]


BEFORE = 0  # the attempt to which a copy belongs: older than any start of the run that it is copied into
_FILES_AT_ONCE = 4  # files at once, each of which needs room for itself in the temporary folder


def copy_checkpoint(
    source: Store, manifest: CheckpointManifest, target: Store, now: float
) -> CheckpointManifest:
    """The checkpoint `manifest` of `source` as the first one of the run in `target`, of attempt `BEFORE`.

    As in any save, the manifest comes last; an interrupted copy may be repeated. `now` in seconds since 1970.

    Raises:
        DamagedCheckpoint: what is read, or what was written, does not match its hashes.
        CheckpointError: there is another checkpoint in its place. OutOfSpace, StoreError: a store or the disk fails.
    """
    mark = CheckpointName(BEFORE, manifest.step)
    files = tuple(
        file.model_copy(update={"key": mark.file(rank)}) for rank, file in enumerate(manifest.files)
    )
    with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
        list(
            pool.map(
                lambda pair: _copy(source, pair[0], target, pair[1]), zip(manifest.files, files, strict=True)
            )
        )
    lineage = (LineageSegment(attempt=BEFORE, start=0, stop=manifest.step),)
    copied = manifest.model_copy(
        update={"attempt": BEFORE, "files": files, "lineage": lineage, "created": now}
    )
    wrong = verify(target, copied)
    if wrong:
        raise DamagedCheckpoint(
            f"the copy in {target.uri} does not match what was written: {'; '.join(wrong)}",
            remedy="copy it again",
        )
    if target.put_if_absent(mark.manifest, encode(copied)):
        return copied
    if read_manifest(target, mark).model_copy(update={"created": now}) != copied:
        raise CheckpointError(
            f"{target.uri}/{mark.manifest} is another checkpoint", remedy="copy to another place"
        )
    return copied


def _copy(source: Store, file: File, target: Store, to: File) -> None:
    """Through a local file: a rank's part may be larger than this machine's memory."""
    with tempfile.NamedTemporaryFile(prefix="maskfleet-copy-") as local:
        for index in range(len(file.hashes)):
            chunk = read_chunk(source, file, index)
            try:
                local.write(chunk)
                local.flush()
            except OSError as error:
                raise OutOfSpace.at(local.name, error.strerror or str(error)) from error
        target.put_file(to.key, Path(local.name))
