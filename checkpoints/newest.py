"""The newest checkpoint without damage: all ranks agree on it before any of them reads its tensors (`load.py`)."""

from dataclasses import dataclass

from pydantic import JsonValue, TypeAdapter

from checkpoints.errors import DamagedCheckpoint, NoGoodCheckpoint
from checkpoints.gather import Peers, broadcast_or_raise, gather_or_raise
from checkpoints.layout import CheckpointManifest, CheckpointName
from checkpoints.listing import list_committed, read_manifest
from checkpoints.verify import verify_files
from data_service.store.base import Store

_NAMES_TYPE = TypeAdapter(list[tuple[int, int]])
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
    names = broadcast_or_raise(peers, lambda: _list_names(store))
    passed_over: list[str] = []
    for attempt, step in _NAMES_TYPE.validate_python(names):
        name = CheckpointName(attempt, step)
        manifest, wrong = _read_manifest_once(store, name, peers)
        if manifest is not None:
            wrong = _verify_on_all_ranks(store, manifest, peers, full)
            if not wrong:
                return GoodCheckpoint(manifest, tuple(passed_over))
        passed_over.append(f"step {step} (attempt {attempt}): {'; '.join(wrong)}")
    if not passed_over:
        return None
    raise NoGoodCheckpoint(
        f"{store.uri} has checkpoints, but none can be loaded:\n    " + "\n    ".join(passed_over),
        remedy="restore the files named above from a copy, or start a new run from an older export",
    )


def _list_names(store: Store) -> JsonValue:
    return [[name.attempt, name.step] for name in list_committed(store)]


def _read_manifest_once(
    store: Store, name: CheckpointName, peers: Peers
) -> tuple[CheckpointManifest | None, list[str]]:
    """Read the manifest on rank 0; return it on all ranks, or None and its problems."""

    def read() -> JsonValue:
        try:
            return read_manifest(store, name).model_dump(mode="json")
        except DamagedCheckpoint as error:
            return error.problem

    answer = broadcast_or_raise(peers, read)
    return (None, [answer]) if isinstance(answer, str) else (CheckpointManifest.model_validate(answer), [])


def _verify_on_all_ranks(store: Store, manifest: CheckpointManifest, peers: Peers, full: bool) -> list[str]:
    share = manifest.files[peers.rank :: peers.world]
    answers = gather_or_raise(peers, lambda: list(verify_files(store, manifest, share, full=full)))
    return [problem for answer in _PROBLEMS_TYPE.validate_python(answers) for problem in answer]
