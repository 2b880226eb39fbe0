"""`StepDataset`: a run's training data for another trainer, through torch's own `IterableDataset`.

The rows are those that the run's own ranks get, byte for byte: both are the same function of recipe and step. They are
made in the process that iterates, without Ray: each process builds every window that its steps lie in, so that many
ranks or workers repeat that work. A run's own training shares it through the data service.
"""

import os
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from data_service.samples.samples import Samples, join_rows
from data_service.stream.stream import Stream
from encoder_core.train.collate import idle_batch, to_batch
from launcher.errors import RunError
from launcher.runtime.rank.data import RankShard
from launcher.runtime.recipe.summary import settled
from launcher.runtime.run.record import Run, open_run
from launcher.runtime.run.streams import left_out, sample_positions, stream_spec

IGNORED = -100
"""The label where nothing is to be predicted: what torch's cross-entropy ignores."""

_CPU = torch.device("cpu")


class RunData:
    """A run's samples by step. Raises RunError, CorpusError, TokenizerError, StoreError."""

    def __init__(self, run: Run) -> None:
        tokenizer = run.tokenizer()
        cache = run.store.at("cache")
        specs = [stream_spec(run, tokenizer, phase) for phase in range(len(run.recipe.phases))]
        self._streams = [Stream(spec, cache=cache) for spec in specs]
        self._positions = sample_positions(run, self._streams, left_out(run))
        self._recipe = run.recipe
        self.pad = tokenizer.special.pad

    def microbatches(self, step: int, rank: int, world: int) -> list[Samples]:
        """The logical microbatches of `step` that rank `rank` of `world` trains on, in order. Where memory decides how
        large they are, the rank's part of the step is one."""
        rows = settled(self._recipe, world).phase_microbatches
        mine, _ = RankShard(rank, world, rows).deal(self._positions.ranges(step))
        return [
            join_rows([self._streams[r.phase].read(r.epoch, r.start, r.stop) for r in ranges])
            for _, ranges in mine
        ]


class StepDataset(IterableDataset[dict[str, Tensor]]):
    """A run's training data, one item for each step. For a `DataLoader` with `batch_size=None`.

    An item holds the R rows that this rank has in the step (R may be 0), L being the longest of them:

        step            [] int64, counted from 0
        input_ids       [R, L] int64, masked, padded on the right
        attention_mask  [R, L] int64, 1 where there is a token
        labels          [R, L] int64, the original id where it is to be predicted, else -100
        token_type_ids  [R, L] int64, where rows have two segments
        langs           [R, L] int64, the number of each token's language, where the model has embeddings of them (XLM)
        position_ids    [R, L] int64, where positions begin again with a translation
        pair_labels     [R] int64, where a pair is judged: `next_sentence_label`, `sentence_order_label`
        order           [R, L] int64, where prediction is permuted (XLNet): a token's content may use tokens of no
                        higher number, its prediction those of lower; -1 in padding
        reversed_rows   [R] bool, with `order`: rows laid out from last token to first
        group           [] int64, where rows are texts of examples (contrastive training): G texts, one after another,
                        are an example: query, positive, negatives. R is a multiple of it

    `state_dict` and `load_state_dict` say and set the step to go on with, in a loop of one process and for torchdata's
    `StatefulDataLoader`. The workers of a plain `DataLoader` read ahead: with them, load `{"step": item["step"] + 1}`.

    Args:
        uri: the run.
        rank, world: whose rows.
        start, stop: steps; None: to the run's last.

    Raises:
        RunError: there is no such run, step or rank.
    """

    def __init__(
        self, uri: str, *, rank: int = 0, world: int = 1, start: int = 0, stop: int | None = None
    ) -> None:
        run = open_run(uri)
        self.uri, self.rank, self.world = uri, rank, world
        self._first, self.stop = run.record.data_begins, run.recipe.total_steps if stop is None else stop
        if not 0 <= rank < world:
            raise RunError(f"there is no rank {rank} of {world}", remedy=f"ranks are 0 to {world - 1}")
        if not self._first <= start <= self.stop <= run.recipe.total_steps:
            raise RunError(
                f"{uri} has no data for steps {start} to {self.stop}",
                remedy=f"its steps are {self._first} to {run.recipe.total_steps - 1}",
            )
        self._start = self._next = start
        self._workers: int | None = None  # whose state was loaded; None: everybody's
        self._in_workers = torch.zeros(1, dtype=torch.uint8)  # 1: they iterate, not this process
        self._in_workers.share_memory_()  # type: ignore[no-untyped-call]
        self._data: tuple[int, RunData] | None = None  # of the process of that id: a fork opens its own

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """From the step that was given, or was loaded last."""
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if info is not None:
            self._in_workers.fill_(1)
        first = self._start + (number if self._workers is None else 0)
        for step in range(first, self.stop, workers):
            item = self._item(step)
            self._next = step + workers
            yield item

    def state_dict(self) -> dict[str, int]:
        """The step to go on with; in a worker of a loader that worker's own.

        Raises RunError: worker processes iterate, and only they know.
        """
        info = get_worker_info()
        if info is not None:
            return {"step": self._next, "workers": info.num_workers}
        if self._in_workers.item():
            raise RunError(
                "a DataLoader's workers read this dataset, and ahead of the trainer",
                remedy='keep {"step": item["step"] + 1} of the last item, or use torchdata\'s StatefulDataLoader',
            )
        return {"step": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on with the step of a `state_dict`. Raises RunError: no such step, or another number of workers."""
        step, workers, info = state["step"], state.get("workers"), get_worker_info()
        if step < self._first:
            raise RunError(f"{self.uri} has no data for step {step}", remedy=f"its first is {self._first}")
        if workers is not None and (info is None or info.num_workers != workers):
            raise RunError(
                f"the state is of a loader with {workers} workers",
                remedy=f"use {workers} workers, or load {{'step': ...}} with the next step before iterating",
            )
        self._start, self._next, self._workers = step, step, workers

    def microbatches(self, step: int) -> list[Samples]:
        """This rank's logical microbatches of `step` as the run's own ranks get them: NumPy arrays, rows end to end."""
        return self._opened().microbatches(step, self.rank, self.world)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_data": None}

    def _opened(self) -> RunData:
        if self._data is None or self._data[0] != os.getpid():
            self._data = os.getpid(), RunData(open_run(self.uri))
        return self._data[1]

    def _item(self, step: int) -> dict[str, Tensor]:
        parts = self.microbatches(step)
        rows = join_rows(parts) if len(parts) > 1 else parts[0] if parts else None
        return {"step": torch.tensor(step)} | _padded(rows, self._opened().pad)


def _padded(rows: Samples | None, pad: int) -> dict[str, Tensor]:
    """Ragged rows as rectangles."""
    batch = idle_batch(_CPU) if rows is None else to_batch(rows, _CPU)
    shape = (batch.rows, batch.max_length)
    lengths = batch.cu_seqlens.diff().long()
    row, column = torch.repeat_interleave(torch.arange(batch.rows), lengths), batch.positions

    def lay(values: Tensor, filler: int) -> Tensor:
        laid = torch.full(shape, filler, dtype=torch.int64)
        laid[row, column] = values
        return laid

    labels = torch.full_like(batch.tokens, IGNORED)
    labels[batch.target_positions] = batch.target_ids
    found = {
        "input_ids": lay(batch.tokens, pad),
        "attention_mask": lay(torch.ones_like(batch.tokens), 0),
        "labels": lay(labels, IGNORED),
    }
    if rows is None:
        return found
    if batch.segments is not None:
        found["token_type_ids"] = lay(batch.segments, 0)
    if batch.languages is not None:
        found["langs"] = lay(batch.languages, 0)
    if batch.restarted is not None:
        found["position_ids"] = lay(batch.restarted, 0)
    if batch.order is not None:
        found["order"] = lay(batch.order, -1)
    singles = {"pair_labels": batch.pair_labels, "reversed_rows": batch.reversed_rows}
    if batch.group > 1:
        found["group"] = torch.tensor(batch.group)
    return found | {name: values for name, values in singles.items() if values is not None}
