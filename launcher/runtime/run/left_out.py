"""The data that a run leaves out: what it had read before it went back from a loss spike."""

from dataclasses import dataclass

from pydantic import JsonValue

from checkpoints.gather import Alone, Peers, first_or_raise
from checkpoints.layout import CheckpointManifest
from checkpoints.listing import Rewind, Span, rewinds, skips
from checkpoints.load import newest_good
from data_service.stream.positions import Range
from launcher.runtime.run.record import Run

RECENT = "spikes"
"""Where a manifest's state has what is remembered of the losses."""


@dataclass(frozen=True)
class Lost:
    """What a resume knows of data left out and of rewinds.

    Attributes:
        spans: the ranges left out.
        gone_back: the rewinds so far, the oldest first.
    """

    spans: tuple[Span, ...]
    gone_back: tuple[Rewind, ...]

    @property
    def ranges(self) -> tuple[Range, ...]:
        return tuple(Range(*span) for span in self.spans)


def read_lost(run: Run, good: CheckpointManifest | None, peers: Peers) -> Lost:
    """As rank 0 reads it, for all. Raises StoreError, on all."""

    def read() -> JsonValue:
        return [rewind.model_dump(mode="json") for rewind in rewinds(run.store)]

    answer = first_or_raise(peers, read)
    assert isinstance(answer, list)
    gone_back = tuple(Rewind.model_validate(rewind) for rewind in answer)
    return Lost(skips(good, gone_back), gone_back)


def left_out(run: Run) -> tuple[Range, ...]:
    """The ranges that the run leaves out now. Raises NoGoodCheckpoint, StoreError."""
    good = newest_good(run.store, Alone(), full=False)
    return read_lost(run, good.manifest if good else None, Alone()).ranges
