"""Plans over corpora that are numbers alone, and what is in their epochs."""

import numpy as np
from corpus import spec_of

from data_service.corpus.manifest import BlockTable, block_table
from data_service.samples.spec import SourceSpec
from data_service.stream.plan import StreamPlan


def table_of(rows: list[int]) -> BlockTable:
    """A table of blocks with 10 tokens a row; there is no data behind it."""
    return block_table([(0, 0, 0, 10 * n, n, 1) for n in rows], ["0" * 32] * len(rows), ["shard"])


def plan_of(rows: list[list[int]], weights: list[float] | None = None, **settings: object) -> StreamPlan:
    corpora = [
        SourceSpec(name=f"s{i}", uri=f"u{i}", manifest_fingerprint=f"f{i}", weight=weights and weights[i])
        for i in range(len(rows))
    ]
    spec = spec_of(*corpora, **{"window": {"samples": 7, "least_tokens": 1}, **settings})
    return StreamPlan(spec, tuple(map(table_of, rows)), tuple(np.array(counts) for counts in rows))


def rows_of_epoch(plan: StreamPlan, epoch: int) -> list[tuple[int, int, int, int]]:
    """(source, block, row, the source's epoch) of every sample, in order."""
    found = []
    for window in range(plan.epoch_layout.windows):
        made = plan.window(epoch, window)
        rows = [(p.source, p.block, row, p.epoch) for p in made.pieces for row in range(p.start, p.stop)]
        found += [rows[i] for i in made.order.many(np.arange(len(rows))).tolist()]
    return found
