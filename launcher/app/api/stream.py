"""`StepDataset`: a run's training data for another trainer, as torch's `IterableDataset`.

The rows are byte for byte those of the run's own ranks, because both are the same function of recipe and step. The
iterating process builds the rows itself, without Ray. Each process builds every window that its steps lie in, so
several ranks or workers repeat that work; a run's own training shares it through the data service.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from data_service.samples.samples import Samples, join_rows
from data_service.stream.stream import Stream
from encoder_core.batch import Batch, idle_batch
from launcher.errors import RunError
from launcher.runtime.rank.collate import to_batch
from launcher.runtime.rank.data import RankShard
from launcher.runtime.recipe.summary import with_microbatch_rows
from launcher.runtime.run.record import Run, open_run
from launcher.runtime.run.removals import CorpusStates
from launcher.runtime.run.streams import current_skipped_ranges, sample_positions, stream_spec

IGNORED_LABEL = -100
"""The label where nothing is to be predicted: what torch's cross-entropy ignores."""

_CPU_DEVICE = torch.device("cpu")


class RunData:
    """Builds the samples of a run's steps.

    Raises:
        RunError, CorpusError, TokenizerError, StoreError: the run, a corpus, the tokenizer or the store cannot be read.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._tokenizer = run, run.tokenizer()
        self._by_states: dict[frozenset[tuple[str, str]], list[Stream]] = {}  # opened streams, by states of corpora
        self._positions = sample_positions(run, self._streams(run.removals), current_skipped_ranges(run))
        self.pad = self._tokenizer.special.pad

    def microbatches(self, step: int, rank: int, world: int) -> list[Samples]:
        """Return the microbatches of `step` that rank `rank` of `world` trains on, in order.

        With `microbatch: auto`, the rank's part of the step is one microbatch.
        """
        rows = with_microbatch_rows(self._run.recipe, world).microbatch_rows_by_phase
        mine, _ = RankShard(rank, world, rows).deal(self._positions.ranges_of_step(step))
        streams = self._streams(self._run.removal_history.states_at(step))
        return [join_rows([streams[r.phase].read(r.epoch, r.start, r.stop) for r in ranges]) for _, ranges in mine]

    def _streams(self, corpus_states: CorpusStates) -> list[Stream]:
        """Return each phase's stream, without documents that are removed in these states. Streams are opened once."""
        key = frozenset(corpus_states.items())
        if key not in self._by_states:
            run, cache = replace(self._run, wanted=corpus_states), self._run.store.with_prefix("cache")
            specs = [stream_spec(run, self._tokenizer, phase) for phase in range(len(run.recipe.phases))]
            self._by_states[key] = [Stream(spec, cache=cache) for spec in specs]
        return self._by_states[key]


class StepDataset(IterableDataset[dict[str, Tensor]]):
    """A run's training data, one item a step, for a `DataLoader` with `batch_size=None`.

    An item holds the R rows that this rank has in the step; R may be 0. L is the length of the longest row.

        step            [] int64, counted from 0
        input_ids       [R, L] int64, masked, padded on the right
        attention_mask  [R, L] int64, 1 where there is a token, 0 in padding
        labels          [R, L] int64, the original id where it is to be predicted, else -100
        token_type_ids  [R, L] int64, only if rows have two segments
        langs           [R, L] int64, the language of each token, only if the model embeds languages (XLM)
        position_ids    [R, L] int64, only if positions begin again with a translation
        pair_labels     [R] int64, only if pairs are classified: `next_sentence_label`, `sentence_order_label`
        order           [R, L] int64, only if prediction is permuted (XLNet): a token's content may attend to tokens
                        of the same or a lower number, its prediction to tokens of a lower number; -1 in padding
        reversed_rows   [R] bool, with `order`: rows laid out from the last token to the first
        rates           [R] float32, only for masked diffusion: probability with which each token of a row was hidden;
                        the loss of the row is divided by it
        maskable        [R] int64, with `rates`: number of tokens of each row that could be hidden
        corrupted       [] bool, only for denoising: `input_ids` are the rows' corrupted forms, shorter than `labels`,
                        which are the rows; both with masks of their own lengths (`attention_mask`, and -100 in labels)
        causal          [] bool, only if a token may attend to no later one (next-token prediction); a label is then
                        to be predicted from the tokens before it
        group           [] int64, only if rows are texts of examples (contrastive training): every `group` rows are
                        one example: query, positive, negatives; R is a multiple of it

    `state_dict` returns and `load_state_dict` sets the next step, for a loop in one process and for torchdata's
    `StatefulDataLoader`. The workers of a plain `DataLoader` read ahead of the trainer: with them, load `{"step":
    item["step"] + 1}` of the last item.

    Args:
        uri: URI of the run.
        rank, world: the rank whose rows are read, and the number of ranks.
        start, stop: first step, and the step before which to stop; None: after the run's last.

    Raises:
        RunError: there is no run at `uri`, or it has no such step or rank.
    """

    def __init__(self, uri: str, *, rank: int = 0, world: int = 1, start: int = 0, stop: int | None = None) -> None:
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
        self._workers: int | None = None  # number of DataLoader workers in the loaded state
        self._in_workers = torch.zeros(1, dtype=torch.uint8)  # 1 as soon as a DataLoader's workers iterate
        self._in_workers.share_memory_()  # type: ignore[no-untyped-call]
        self._data: tuple[int, RunData] | None = None  # process id and data; a forked process opens its own data

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield items, beginning with the step that was loaded last, or else with `start`."""
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        if info is not None:
            self._in_workers.fill_(1)
        first = self._start + (number if self._workers is None else 0)
        for step in range(first, self.stop, workers):
            item = self._make_item(step)
            self._next = step + workers
            yield item

    def state_dict(self) -> dict[str, int]:
        """Return the step to continue with. In a worker of a `DataLoader` it is that worker's next step.

        Raises:
            RunError: the main process calls it while `DataLoader` workers iterate; only the workers know their steps.
        """
        info = get_worker_info()
        if info is not None:
            return {"step": self._next, "workers": info.num_workers}
        if self._in_workers.item():
            raise RunError(
                "this process does not know the next step, because a DataLoader's workers iterate over the dataset",
                remedy='save {"step": item["step"] + 1} of the last item, or use torchdata\'s StatefulDataLoader',
            )
        return {"step": self._next}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue with the step of a `state_dict`.

        Raises:
            RunError: the run has no data for that step, or the state is from another number of workers.
        """
        step, workers, info = state["step"], state.get("workers"), get_worker_info()
        if step < self._first:
            raise RunError(f"{self.uri} has no data for step {step}", remedy=f"its first step is {self._first}")
        if workers is not None and (info is None or info.num_workers != workers):
            raise RunError(
                f"the state was saved by a DataLoader with {workers} workers, but this one has another number of them",
                remedy=f"use {workers} workers, or load {{'step': ...}} with the next step before iterating",
            )
        self._start, self._next, self._workers = step, step, workers

    def microbatches(self, step: int) -> list[Samples]:
        """Return this rank's microbatches of `step` as the run's own ranks get them: NumPy arrays, rows end to end."""
        return self._open_data().microbatches(step, self.rank, self.world)

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"_data": None}

    def _open_data(self) -> RunData:
        if self._data is None or self._data[0] != os.getpid():
            self._data = os.getpid(), RunData(open_run(self.uri))
        return self._data[1]

    def _make_item(self, step: int) -> dict[str, Tensor]:
        parts = self.microbatches(step)
        rows = join_rows(parts) if len(parts) > 1 else parts[0] if parts else None
        return {"step": torch.tensor(step)} | _padded_item(rows, self._open_data().pad)


def _padded_item(rows: Samples | None, pad_id: int) -> dict[str, Tensor]:
    """Return the tensors of an item without `step`: the ragged rows, padded to [R, L]."""
    batch = idle_batch(_CPU_DEVICE) if rows is None else to_batch(rows, _CPU_DEVICE)
    lay = partial(_pad_values, batch)
    labels = torch.full_like(batch.tokens, IGNORED_LABEL)
    labels[batch.target_positions] = batch.target_ids
    found = {"labels": lay(labels, IGNORED_LABEL), **_encoder_inputs(batch, pad_id)}
    if batch.corrupted is not None:
        return found | _encoder_inputs(batch.corrupted, pad_id) | {"corrupted": torch.tensor(True)}
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
    singles = {
        "pair_labels": batch.pair_labels,
        "reversed_rows": batch.reversed_rows,
        "rates": batch.rates,
        "maskable": batch.maskable,
    }
    if batch.causal:
        found["causal"] = torch.tensor(True)
    if batch.group > 1:
        found["group"] = torch.tensor(batch.group)
    return found | {name: values for name, values in singles.items() if values is not None}


def _pad_values(batch: Batch, values: Tensor, filler: int) -> Tensor:
    """Return [R, L] int64: the `values` [T] of the batch's tokens, padded with `filler`."""
    row = torch.repeat_interleave(torch.arange(batch.rows), batch.cu_seqlens.diff().long())
    laid = torch.full((batch.rows, batch.max_length), filler, dtype=torch.int64)
    laid[row, batch.positions] = values
    return laid


def _encoder_inputs(batch: Batch, pad_id: int) -> dict[str, Tensor]:
    """Return the inputs of an encoder: padded token ids and attention mask."""
    return {
        "input_ids": _pad_values(batch, batch.tokens, pad_id),
        "attention_mask": _pad_values(batch, torch.ones_like(batch.tokens), 0),
    }
