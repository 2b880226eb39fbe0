"""Which removals from its corpora a run leaves out, and from which step on.

A run that is made reads its corpora without the documents that were removed by then; `run.json` names that state of
each corpus. If documents are removed later, the run goes on only when told to leave them out. The attempt that does so
records the step that it resumes from, before it reads anything:

    removals/000001.json    from step 1200 on, by attempt 3; created by conditional put

So every step has one state of the corpora, on every rank and after every kill. An attempt that goes back behind that
step adds a record for the earlier step: a removed document is never read again.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from pydantic import JsonValue, NonNegativeInt, TypeAdapter, ValidationError

from checkpoints.attempt import Attempt
from checkpoints.errors import DamagedCheckpoint
from checkpoints.gather import Peers, first_or_raise
from checkpoints.layout import Strict, first_problem, refuse_newer, sealed, unsealed
from data_service.corpus.manifest_file import load_manifest
from data_service.corpus.removals import load_removals, removals_at
from data_service.store.base import Store
from data_service.store.open import open_store

if TYPE_CHECKING:
    from launcher.runtime.run.record import Run

LEFT_OUT = "removals/"
_SEALED = "removals"

CorpusStates = Mapping[str, str]
"""The digest up to which removals are left out (`RemovalChain.digest`), by name of the source; without those of which
nothing was removed."""


class LeftOut(Strict):
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
    records: tuple[LeftOut, ...] = ()

    @property
    def newest(self) -> CorpusStates:
        """The states from now on."""
        return self.records[-1].states if self.records else self.first

    def at(self, step: int, attempt: int | None = None) -> CorpusStates:
        """Return the states that a step reads; with `attempt`, those that it read in that attempt or an earlier one."""
        known = [
            one for one in self.records if one.step <= step and (attempt is None or one.attempt <= attempt)
        ]
        return known[-1].states if known else self.first


def read_left_out(store: Store) -> tuple[LeftOut, ...]:
    """Return the records in a run's store, the oldest first.

    Raises:
        DamagedCheckpoint: a record is missing or cannot be read. Without it removed documents could be read again.
        StoreError: the store cannot be read.
    """
    keys = [entry.key for entry in store.list(LEFT_OUT)]
    for number, key in enumerate(keys, 1):
        if key != _key(number):
            raise _damaged(store, _key(number), f"it is missing, but {key} is there")
    return tuple(_read(store, key) for key in keys)


def settle_removals(run: "Run", attempt: Attempt, step: int, peers: Peers) -> tuple["Run", LeftOut | None]:
    """Return `run` as it goes on at `step`, and the record that this added; None if there was nothing to add.

    Rank 0 decides and writes, for all ranks.

    Raises:
        Superseded: a newer attempt has been claimed.
        DamagedCheckpoint, StoreError: as `read_left_out`.
    """

    def settle() -> JsonValue:
        records = read_left_out(run.store)
        wanted = dict(run.removals)
        if dict(RemovalHistory(run.record.inputs.removals, records).at(step)) == wanted:
            return [each.model_dump(mode="json") for each in records]
        attempt.ensure_current()
        new = LeftOut(step=step, attempt=attempt.number, states=wanted)
        write_left_out(run.store, len(records) + 1, new)
        return [each.model_dump(mode="json") for each in (*records, new)]

    records = _RECORDS.validate_python(first_or_raise(peers, settle))
    added = records[-1] if records and records[-1].attempt == attempt.number else None
    return replace(run, left_out=records), added


_RECORDS = TypeAdapter(tuple[LeftOut, ...])


def write_left_out(store: Store, number: int, record: LeftOut) -> None:
    """Write record `number`, counted from 1. Raises DamagedCheckpoint: another process has just written that one."""
    if not store.put_if_absent(_key(number), sealed(_SEALED, record.model_dump_json().encode())):
        raise _damaged(store, _key(number), "another start of the run has just written it")


def gained(run: "Run", heads: CorpusStates, sources: Container[str]) -> list[str]:
    """Return a line for each of `sources` from which documents were removed that the run still reads.

    `heads`: the present states of the corpora.

    Raises:
        CorpusError: a corpus has lost the removals that the run leaves out, or their list is damaged.
        StoreError: a store cannot be read.
    """
    lines = []
    for name, source in run.recipe.corpus.sources.items():
        known = run.removals.get(name, "")
        if name not in sources or known == heads.get(name, ""):
            continue
        store = open_store(source.uri)
        manifest = load_manifest(store)
        before = removals_at(store, manifest, known)
        later = load_removals(store, manifest).removals[len(before.removals) :]
        documents = sum(len(one.train) + len(one.heldout) for one in later)
        lines.append(f"corpus.sources.{name}: {documents:,} documents were removed from {source.uri}")
    return lines


def _key(number: int) -> str:
    return f"{LEFT_OUT}{number:06d}.json"


def _read(store: Store, key: str) -> LeftOut:
    data = store.get(key)
    body = unsealed(_SEALED, data)
    if body is None:
        raise _damaged(store, key, "its bytes do not match its digest")
    try:
        return LeftOut.model_validate_json(body)
    except ValidationError as error:
        refuse_newer(body, f"{store.uri}/{key}", error)
        raise _damaged(store, key, first_problem(error)) from error


def _damaged(store: Store, key: str, reason: str) -> DamagedCheckpoint:
    return DamagedCheckpoint(
        f"{store.uri}/{key} cannot be used: {reason}",
        remedy="restore it from a copy of the run; without it the run could read removed documents again",
    )
