"""Records which documents, removed from the corpora, a run skips, and from which step on.

A new run reads its corpora without the documents removed so far; run.json has that state of each corpus. If documents
are removed later, a start needs `--without-removed` to continue without them. Its attempt first records the step from
which it resumes:

    removals/000001.json    from step 1200 on, by attempt 3; created by conditional put

So each step has one state of the corpora, on every rank and after every restart. An attempt that returns to an earlier
step adds a record for that step: a removed document is never read again.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import NonNegativeInt

from checkpoints.errors import DamagedCheckpoint
from checkpoints.layout import add_digest, decode_record
from data_service.formats import StrictRecord
from data_service.store.base import Store

REMOVALS_PREFIX = "removals/"
_DIGEST_LABEL = "removals"  # name of the record beside its digest (`add_digest`)
_REMEDY = "restore it from a copy of the run; otherwise the run could read removed documents again"

CorpusStates = Mapping[str, str]
"""State of each corpus, by name: the digest of its list of removed documents (`RemovalChain.digest`). Corpora without
removals are absent."""


class RemovalRecord(StrictRecord):
    """A change of the states of the corpora that a run reads.

    Attributes:
        step: first step that reads the corpora in `states`.
        attempt: number of the attempt that resumed from `step`; 0 for records with which a fork was created.
        states: states of the corpora from `step` on.
    """

    format: Literal[1] = 1
    step: NonNegativeInt
    attempt: NonNegativeInt
    states: dict[str, str]


@dataclass(frozen=True)
class RemovalHistory:
    """Which states of the corpora each step of a run reads.

    Attributes:
        first: states when the run was created.
        records: later changes, the oldest first.
    """

    first: CorpusStates
    records: tuple[RemovalRecord, ...] = ()

    @property
    def newest_states(self) -> CorpusStates:
        """The states that new steps read."""
        return self.records[-1].states if self.records else self.first

    def states_at(self, step: int, attempt: int | None = None) -> CorpusStates:
        """Return the states that `step` reads; with `attempt`, ignore the records of later attempts."""
        known = [one for one in self.records if one.step <= step and (attempt is None or one.attempt <= attempt)]
        return known[-1].states if known else self.first


def read_removals(store: Store) -> tuple[RemovalRecord, ...]:
    """Return the removal records of the run in `store`, the oldest first.

    Raises:
        DamagedCheckpoint: a record is missing or damaged, so removed documents could be read again.
        StoreError: the store cannot be read.
    """
    keys = [entry.key for entry in store.list(REMOVALS_PREFIX)]
    for number, key in enumerate(keys, 1):
        if key != _record_key(number):
            raise _damaged_error(store, _record_key(number), f"it is missing, although {key} exists")
    return tuple(
        decode_record(RemovalRecord, _DIGEST_LABEL, store.get(key), f"{store.uri}/{key}", remedy=_REMEDY)
        for key in keys
    )


def write_removals(store: Store, number: int, record: RemovalRecord) -> None:
    """Write removal record `number`, counted from 1. Raises DamagedCheckpoint if it exists with other content.

    The same content may exist: an interrupted fork has written it before.
    """
    key, data = _record_key(number), add_digest(_DIGEST_LABEL, record.model_dump_json().encode())
    if not store.put_if_absent(key, data) and store.get(key) != data:
        raise _damaged_error(store, key, "another start of the run has just written it with other content")


def _record_key(number: int) -> str:
    return f"{REMOVALS_PREFIX}{number:06d}.json"


def _damaged_error(store: Store, key: str, reason: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{store.uri}/{key} cannot be used: {reason}", remedy=_REMEDY)
