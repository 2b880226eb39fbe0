"""Which removals from its corpora a run leaves out, and from which step on.

A run that is made reads its corpora without the documents that were removed by then; `run.json` names that state of
each corpus. If documents are removed later, the run goes on only when told to leave them out. The attempt that does so
records the step that it resumes from, before it reads anything:

    removals/000001.json    from step 1200 on, by attempt 3; created by conditional put

So every step has one state of the corpora, on every rank and after every kill. An attempt that goes back behind that
step adds a record for the earlier step: a removed document is never read again.
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
_DIGEST_LABEL = "removals"
_REMEDY = "restore it from a copy of the run; without it the run could read removed documents again"

CorpusStates = Mapping[str, str]
"""The digest up to which removals are left out (`RemovalChain.digest`), by name of the source. Sources from which
nothing was removed are absent."""


class RemovalRecord(StrictRecord):
    """The record of removals that a run leaves out from a step on.

    Attributes:
        step: first step that does not read them.
        attempt: attempt that resumed there; 0 in a fork for what it knew when it was made.
        states: states of the corpora from then on.
    """

    format: Literal[1] = 1
    step: NonNegativeInt
    attempt: NonNegativeInt
    states: dict[str, str]


@dataclass(frozen=True)
class RemovalHistory:
    """The states of the corpora that each step of a run reads.

    Attributes:
        first: states when the run was made.
        records: what was left out later, the oldest first.
    """

    first: CorpusStates
    records: tuple[RemovalRecord, ...] = ()

    @property
    def newest_states(self) -> CorpusStates:
        """The states from now on."""
        return self.records[-1].states if self.records else self.first

    def states_at(self, step: int, attempt: int | None = None) -> CorpusStates:
        """Return the states that a step reads; with `attempt`, those that it read in that attempt or an earlier one."""
        known = [one for one in self.records if one.step <= step and (attempt is None or one.attempt <= attempt)]
        return known[-1].states if known else self.first


def read_removals(store: Store) -> tuple[RemovalRecord, ...]:
    """Return the records in a run's store, the oldest first.

    Raises:
        DamagedCheckpoint: a record is missing or cannot be read. Without it removed documents could be read again.
        StoreError: the store cannot be read.
    """
    keys = [entry.key for entry in store.list(REMOVALS_PREFIX)]
    for number, key in enumerate(keys, 1):
        if key != _record_key(number):
            raise _damaged_error(store, _record_key(number), f"it is missing, but {key} is there")
    return tuple(
        decode_record(RemovalRecord, _DIGEST_LABEL, store.get(key), f"{store.uri}/{key}", remedy=_REMEDY)
        for key in keys
    )


def write_removals(store: Store, number: int, record: RemovalRecord) -> None:
    """Write record `number`, counted from 1. Raises DamagedCheckpoint: another process has just written another one.

    The same record may be there already: an interrupted fork is repeated.
    """
    key, data = _record_key(number), add_digest(_DIGEST_LABEL, record.model_dump_json().encode())
    if not store.put_if_absent(key, data) and store.get(key) != data:
        raise _damaged_error(store, key, "another start of the run has just written it")


def _record_key(number: int) -> str:
    return f"{REMOVALS_PREFIX}{number:06d}.json"


def _damaged_error(store: Store, key: str, reason: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(f"{store.uri}/{key} cannot be used: {reason}", remedy=_REMEDY)
