"""The newest checkpoint without damage: all ranks agree on it before any of them reads its tensors (`load.py`)."""

from dataclasses import dataclass

from pydantic import TypeAdapter

from checkpoints.errors import DamagedCheckpoint, NoGoodCheckpoint
from checkpoints.gather import Peers, broadcast_or_raise, gather_or_raise
from checkpoints.layout import CheckpointManifest, CheckpointName
from checkpoints.listing import list_committed, read_manifest
from checkpoints.verify import verify_files
from data_service.store.base import Store

_NAMES_TYPE = TypeAdapter(list[CheckpointName])
_MANIFEST_TYPE: TypeAdapter[CheckpointManifest | str] = TypeAdapter(CheckpointManifest | str)
_PROBLEMS_TYPE = TypeAdapter(list[list[str]])


@dataclass(frozen=True)
class GoodCheckpoint:
    """The checkpoint to resume from, and why each newer one cannot be used.

    Attributes:
        manifest: manifest of the checkpoint.
        passed_over: one line for each newer checkpoint: its name and its problems.
    """

    manifest: CheckpointManifest
    passed_over: tuple[str, ...]


def newest_good(store: Store, peers: Peers, *, full: bool = True) -> GoodCheckpoint | None:
    """Return the newest checkpoint without damage; None if the run has no checkpoint.

    This is a collective: all ranks call it and get the same answer. Every rank verifies its share of the files: their
    sizes and, if `full`, all their bytes.

    Raises:
        NoGoodCheckpoint: the run has checkpoints, and all of them are damaged.
        NewerFormat: a newer version of Maskfleet wrote a checkpoint, and no newer one can be used. This version must
            not continue from an older one.
        StoreError: the store did not answer on some rank. All ranks raise it, so none is left waiting.
    """
    passed_over: list[str] = []
    for name in broadcast_or_raise(peers, lambda: list_committed(store), _NAMES_TYPE):
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

    def read() -> CheckpointManifest | str:
        try:
            return read_manifest(store, name)
        except DamagedCheckpoint as error:
            return error.problem

    return broadcast_or_raise(peers, read, _MANIFEST_TYPE)


def _verify_on_all_ranks(store: Store, manifest: CheckpointManifest, peers: Peers, full: bool) -> list[str]:
    share = manifest.files[peers.rank :: peers.world]
    answers = gather_or_raise(peers, lambda: list(verify_files(store, manifest, share, full=full)))
    return [problem for answer in _PROBLEMS_TYPE.validate_python(answers) for problem in answer]
