"""Settles, at the start of a rank group, from which step on the run leaves removed documents out."""

from dataclasses import replace

from pydantic import JsonValue, TypeAdapter

from checkpoints.attempt import Attempt
from checkpoints.gather import Peers, broadcast_or_raise
from launcher.runtime.run.record import Run
from launcher.runtime.run.removals import RemovalHistory, RemovalRecord, read_removals, write_removals

_RECORDS = TypeAdapter(tuple[RemovalRecord, ...])


def settle_removals(run: Run, attempt: Attempt, step: int, peers: Peers) -> tuple[Run, RemovalRecord | None]:
    """Return `run` as it goes on at `step`, and the record that this added; None if there was nothing to add.

    Rank 0 decides and writes, for all ranks.

    Raises:
        Superseded: a newer attempt has been claimed.
        DamagedCheckpoint, StoreError: as `read_removals`.
    """

    def settle() -> JsonValue:
        records = read_removals(run.store)
        wanted = dict(run.removals)
        if dict(RemovalHistory(run.record.inputs.removals, records).at(step)) == wanted:
            return [each.model_dump(mode="json") for each in records]
        attempt.ensure_current()
        new = RemovalRecord(step=step, attempt=attempt.number, states=wanted)
        write_removals(run.store, len(records) + 1, new)
        return [each.model_dump(mode="json") for each in (*records, new)]

    records = _RECORDS.validate_python(broadcast_or_raise(peers, settle))
    added = records[-1] if records and records[-1].attempt == attempt.number else None
    return replace(run, left_out=records), added
