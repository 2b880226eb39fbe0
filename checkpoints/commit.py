"""The commit: rank 0 decides from all ranks' receipts or errors whether a checkpoint exists, and tells all ranks."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from pydantic import JsonValue, TypeAdapter

from checkpoints.attempt import Attempt
from checkpoints.errors import DamagedCheckpoint
from checkpoints.layout import (
    CheckpointManifest,
    LineageSegment,
    RankFile,
    StoredRange,
    decode_manifest,
    encode_manifest,
    find_problems,
    summarize_problems,
)
from data_service.formats import StrictRecord
from data_service.store.base import Store
from data_service.store.errors import RETRYABLE_ERRORS, StoreError

_RECORDED_LIBRARIES = ("maskfleet", "torch", "deepspeed", "ray", "numpy")  # packages whose versions manifests record


@dataclass(frozen=True)
class CommittedSave:
    """The outcome of a save that was committed.

    Attributes:
        step, attempt: name of the checkpoint.
        bytes: bytes that all ranks stored for it.
        blocked_s: seconds that training waited for the copy, on the slowest rank.
        background_s: seconds that hashing and uploading took, on the slowest rank.
    """

    step: int
    attempt: int
    bytes: int
    blocked_s: float
    background_s: float


@dataclass(frozen=True)
class FailedSave:
    """The outcome of a save that was not committed. Earlier checkpoints are unchanged.

    Attributes:
        step: step that was to be saved.
        reason: ranks that failed and their causes, for people to read.
        transient: whether every cause is a store that may accept the save later: it did not answer, or is full.
    """

    step: int
    reason: str
    transient: bool = False


SaveOutcome = CommittedSave | FailedSave
SAVE_OUTCOME_TYPE: TypeAdapter[SaveOutcome] = TypeAdapter(SaveOutcome)  # converts the outcome that rank 0 sends


class RankReceipt(StrictRecord):
    """One rank's report of the file that it stored: the ranges in it, and seconds as in `CommittedSave`."""

    step: int
    file: RankFile
    pieces: tuple[StoredRange, ...]
    blocked_s: float
    background_s: float


@dataclass(frozen=True)
class Commit:
    """The data from which rank 0 decides whether to commit, and writes the manifest.

    Attributes:
        past, begun_at: lineage (the attempts that trained its steps) and step of the checkpoint that this attempt
            resumed from; () and 0 if it began at step 0.
        step: step that is being saved.
        shapes, own_kinds, memory, state: contents of the manifest's fields of these names.
    """

    store: Store
    attempt: Attempt
    past: tuple[LineageSegment, ...]
    begun_at: int
    step: int
    shapes: dict[str, tuple[int, ...]]
    own_kinds: dict[str, tuple[str, ...]]
    memory: dict[str, tuple[int, ...]]
    state: dict[str, JsonValue]

    def decide_outcome(self, answers: Sequence[JsonValue], now: float) -> SaveOutcome:
        """Return the outcome that follows from the ranks' answers (each a `RankReceipt` or an error).

        Only rank 0 calls this. If nothing is wrong, the manifest is written. `now`: time of the commit (seconds since
        1970). Raises Superseded: a newer attempt has been claimed.
        """
        errors = [answer for answer in answers if isinstance(answer, dict) and "error" in answer]
        if errors:
            reason = "; ".join(str(answer["error"]) for answer in errors)
            return FailedSave(self.step, reason, transient=all(answer["transient"] for answer in errors))
        receipts = [RankReceipt.model_validate(answer) for answer in answers]
        manifest = self._build_manifest(receipts, now)
        try:
            wrong = _incompleteness_text(manifest, receipts) or self._publish(manifest)
        except (StoreError, DamagedCheckpoint) as error:
            reason = f"rank 0, writing the manifest: {error.problem}"
            return FailedSave(self.step, reason, transient=isinstance(error, RETRYABLE_ERRORS))
        if wrong:
            return FailedSave(self.step, wrong)
        return CommittedSave(
            self.step,
            manifest.attempt,
            manifest.bytes,
            blocked_s=max(receipt.blocked_s for receipt in receipts),
            background_s=max(receipt.background_s for receipt in receipts),
        )

    def _build_manifest(self, receipts: list[RankReceipt], now: float) -> CheckpointManifest:
        pieces = [
            piece.model_copy(update={"file": rank}) for rank, receipt in enumerate(receipts) for piece in receipt.pieces
        ]
        apart = self.memory.keys() | self.own_kinds.keys()
        parameters = (piece for piece in pieces if piece.name not in apart)
        kinds = sorted({kind for piece in parameters for kind in piece.offsets})
        mine = LineageSegment(attempt=self.attempt.number, start=self.begun_at, stop=self.step)
        return CheckpointManifest(
            step=self.step,
            attempt=self.attempt.number,
            world_size=len(receipts),
            shapes=self.shapes,
            kinds=tuple(kinds),
            own_kinds=self.own_kinds,
            memory=self.memory,
            files=tuple(receipt.file for receipt in receipts),
            pieces=tuple(pieces),
            state=self.state,
            lineage=(*self.past, mine),
            versions=_versions(),
            created=now,
        )

    def _publish(self, manifest: CheckpointManifest) -> str | None:
        """Write the manifest, which commits the checkpoint. Return None, or an error if another is stored there."""
        self.attempt.ensure_current()
        key = manifest.name.manifest_key
        if self.store.put_if_absent(key, encode_manifest(manifest)):
            return None
        there = decode_manifest(self.store.get(key), f"{self.store.uri}/{key}")
        if there.model_copy(update={"created": manifest.created}) == manifest:
            return None  # The manifest there is ours: an earlier request wrote it, but its answer was lost.
        return f"{self.store.uri}/{key} exists already, and differs"


def _incompleteness_text(manifest: CheckpointManifest, receipts: list[RankReceipt]) -> str | None:
    steps = sorted({receipt.step for receipt in receipts})
    if steps != [manifest.step]:
        return f"the ranks saved different steps: {steps}"
    found = find_problems(manifest)
    return f"incomplete: {summarize_problems(found)}" if found else None


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _RECORDED_LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
