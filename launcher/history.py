"""Reads a run's metrics and events back: the committed lineage's history, whatever the interruptions.

Attempts repeat the steps after the checkpoint they resumed from. In the history a step appears once: when
an attempt records a step, everything recorded before it for that step and later ones is superseded.
"""

import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from data_service.store.base import Store
from launcher.errors import RunError
from launcher.metrics import OPERATOR
from launcher.segments import segment_prefix

Record = dict[str, Any]

_READERS = 16  # concurrent gets: segments are small, so a weeks-long run on S3 is bound by latency


@dataclass(frozen=True)
class History:
    """What happened along the committed lineage.

    Attributes:
        steps: step records, steps strictly increasing.
        evaluations: evaluation records, steps strictly increasing.
        events: all events of all attempts, in order of time.
        repeated: number of step records superseded by a later attempt (work lost to interruptions).
        repeated_seconds: their wall time.
    """

    steps: tuple[Record, ...]
    evaluations: tuple[Record, ...]
    events: tuple[Record, ...]
    repeated: int
    repeated_seconds: float


def read_history(store: Store, latest: int | None = None) -> History:
    """The history of the run stored at `store`. Raises RunError for a damaged segment, StoreError.

    `latest`: read so many segments of metrics and of operators' events only, the newest; no events of attempts then.
    """
    steps: list[Record] = []
    evaluations: list[Record] = []
    lost: list[Record] = []
    for record in _records(store, "metrics/", latest):
        if (
            record["kind"] == "step"
        ):  # `step` steps are done before it, so an evaluation after `step` steps stays
            lost += _truncate(steps, record["step"])
            _truncate(evaluations, record["step"] + 1)
            steps.append(record)
        else:
            _truncate(evaluations, record["step"])
            evaluations.append(record)
    prefix = "events/" if latest is None else segment_prefix("events", OPERATOR)
    events = sorted(_records(store, prefix, latest), key=lambda event: float(event["time"]))
    seconds = sum(float(record["seconds"]) for record in lost)
    return History(tuple(steps), tuple(evaluations), tuple(events), len(lost), seconds)


def _truncate(records: list[Record], step: int) -> list[Record]:
    """Removes and returns the records of `step` and later."""
    cut = len(records)
    while cut and records[cut - 1]["step"] >= step:
        cut -= 1
    removed = records[cut:]
    del records[cut:]
    return removed


def _records(store: Store, prefix: str, latest: int | None) -> Iterator[Record]:
    keys = [entry.key for entry in store.list(prefix) if entry.key.endswith(".jsonl")]
    keys = keys if latest is None else keys[-latest:]
    with ThreadPoolExecutor(_READERS) as pool:
        for key, data in zip(keys, pool.map(store.get, keys), strict=True):
            yield from _parse(f"{store.uri}/{key}", data.splitlines())


def _parse(name: str, lines: Iterable[bytes]) -> Iterator[Record]:
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError as error:
            raise RunError(
                f"{name}, line {number}: not JSON: {error}",
                remedy="the segment was damaged after it was written; move it away to read the rest",
            ) from error
        yield record
