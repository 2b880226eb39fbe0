"""Whether a stored checkpoint is what its manifest says, and reads that check it: no caller gets bytes that do not
match the manifest's hash.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from checkpoints.errors import DamagedCheckpoint, NewerFormat
from checkpoints.layout import CheckpointManifest, CheckpointName, File, problems
from checkpoints.listing import committed, read_manifest
from data_service.store.base import Store, read_verified
from data_service.store.errors import KeyMissing, Truncated

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
