"""The commit: rank 0 decides, from every rank's receipt or error, whether a checkpoint exists, and tells all ranks."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from pydantic import JsonValue

from checkpoints.attempt import Attempt
from checkpoints.errors import CheckpointError, DamagedCheckpoint, Superseded
from checkpoints.layout import (
    CheckpointManifest,
    File,
    LineageSegment,
    StoredRange,
    Strict,
    decode,
    encode,
    problems,
    summary,
)
from data_service.store.base import Store
from data_service.store.errors import TRANSIENT, StoreError

_LIBRARIES = ("maskfleet", "torch", "deepspeed", "ray", "numpy")


@dataclass(frozen=True)
class Committed:
    """A checkpoint exists.

    Attributes:
        step, attempt: which one.
        bytes: stored for it, by all ranks.
        blocked_s: how long training waited for the copy, on the slowest rank.
        background_s: how long hashing and uploading took, on the slowest rank.
    """

    step: int
    attempt: int
    bytes: int
    blocked_s: float
    background_s: float


@dataclass(frozen=True)
class Failed:
    """Nothing was committed; earlier checkpoints are as they were.

    Attributes:
        reason: names ranks and causes.
        transient: every cause is a store that may come back.
    """

    step: int
    reason: str
    transient: bool = False


Outcome = Committed | Failed


class RankReceipt(Strict):
    """What one rank stored."""

    step: int
    file: File
    pieces: tuple[StoredRange, ...]
    blocked_s: float
    background_s: float


@dataclass(frozen=True)
class Commit:
    """What rank 0 knows when it decides.

    Attributes:
        past: the lineage of the checkpoint that the attempt started from, at step `begun_at`.
        now: seconds since 1970.
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
    now: float

    def decide(self, answers: Sequence[JsonValue]) -> JsonValue:
        """Rank 0's decision on the ranks' answers (`RankReceipt` or error), in the form that `outcome_of` reads on
        every rank.
        """
        errors = [answer for answer in answers if isinstance(answer, dict) and "error" in answer]
        if errors:
            reason = "; ".join(str(answer["error"]) for answer in errors)
            return _failed(reason, transient=all(answer["transient"] for answer in errors))
        receipts = [RankReceipt.model_validate(answer) for answer in answers]
        manifest = self._manifest(receipts)
        try:
            wrong = _incomplete(manifest, receipts) or self._publish(manifest)
        except Superseded as error:
            return {"superseded": [error.problem, error.remedy]}
        except (StoreError, DamagedCheckpoint) as error:
            reason = f"rank 0, writing the manifest: {error.problem}"
            return _failed(reason, transient=isinstance(error, TRANSIENT))
        if wrong:
            return _failed(wrong, transient=False)
        return {
            "committed": manifest.bytes,
            "attempt": manifest.attempt,
            "blocked_s": max(receipt.blocked_s for receipt in receipts),
            "background_s": max(receipt.background_s for receipt in receipts),
        }

    def _manifest(self, receipts: list[RankReceipt]) -> CheckpointManifest:
        pieces = [
            piece.model_copy(update={"file": rank})
            for rank, receipt in enumerate(receipts)
            for piece in receipt.pieces
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
            created=self.now,
        )

    def _publish(self, manifest: CheckpointManifest) -> str | None:
        """Writes the manifest, which is the commit; or returns why it did not."""
        self.attempt.ensure_current()
        key = manifest.mark.manifest
        if self.store.put_if_absent(key, encode(manifest)):
            return None
        there = decode(self.store.get(key), f"{self.store.uri}/{key}")
        if there.model_copy(update={"created": self.now}) == manifest:
            return None  # our own, from a commit that failed only in that its answer was lost
        return f"{self.store.uri}/{key} is there already, and differs"


def _incomplete(manifest: CheckpointManifest, receipts: list[RankReceipt]) -> str | None:
    steps = sorted({receipt.step for receipt in receipts})
    if steps != [manifest.step]:
        return f"the ranks saved different steps: {steps}"
    found = problems(manifest)
    return f"incomplete: {summary(found)}" if found else None


def _failed(reason: str, *, transient: bool) -> JsonValue:
    return {"failed": reason, "transient": transient}


def outcome_of(step: int, verdict: JsonValue) -> Outcome:
    match verdict:
        case {
            "committed": int(size),
            "blocked_s": float(blocked),
            "background_s": float(background),
            "attempt": int(n),
        }:
            return Committed(step, n, size, blocked, background)
        case {"failed": str(reason), "transient": bool(transient)}:
            return Failed(step, reason, transient)
        case {"superseded": [str(problem), str(remedy)]}:
            raise Superseded(problem, remedy=remedy)
        case _:
            raise CheckpointError(f"rank 0 decided {verdict!r}", remedy="run the same version on all ranks")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
