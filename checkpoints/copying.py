"""Copying a checkpoint into another run: every byte is checked where it is read, and again where it was written."""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from checkpoints.errors import CheckpointError, DamagedCheckpoint
from checkpoints.layout import CheckpointManifest, CheckpointName, File, LineageSegment, encode
from checkpoints.listing import read_manifest
from checkpoints.verify import read_chunk, verify
from data_service.store.base import Store
from data_service.store.errors import OutOfSpace

BEFORE = 0  # the attempt to which a copy belongs: older than any start of the run that it is copied into
_THREADS = 4  # files at once, each of which needs room for itself in the temporary folder


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
    with ThreadPoolExecutor(_THREADS) as pool:
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
            f"the copy in {target.uri} is not what was written: {'; '.join(wrong)}", remedy="copy it again"
        )
    if target.put_if_absent(mark.manifest, encode(copied)):
        return copied
    if read_manifest(target, mark).model_copy(update={"created": now}) != copied:
        raise CheckpointError(
            f"{target.uri}/{mark.manifest} is there already, and differs", remedy="copy to another place"
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
