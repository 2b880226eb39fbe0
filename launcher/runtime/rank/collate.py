"""Converts rows of the data service (NumPy) to the model's `Batch` (torch)."""

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from data_service.samples.samples import Samples
from encoder_core.batch import Batch, batch_without_targets, idle_batch, select_rows


def to_batch(rows: Samples, device: torch.device, first_number: int = 0) -> Batch:
    """Return N ragged rows as a `Batch` on `device`. Token ids become int64; nothing is padded.

    `first_number` is the number of the first row in the whole batch of its step. Rows with a factorisation order end
    with their classification token, which has segment number 2, as in XLNet. If a row is an example of several texts,
    each text becomes a row of the batch. Holes (`Samples.holes`) stand for removed documents. Rows that consist of
    holes are left out, unless rows continue from step to step (a factorisation order).
    """
    offsets, group = _text_offsets(rows)
    lengths = np.diff(offsets)
    positions = np.arange(len(rows.tokens)) - np.repeat(offsets[:-1], lengths)
    segments = restarted = languages = None
    if rows.segment_starts is not None:
        segments = (positions >= np.repeat(rows.segment_starts, lengths)).astype(np.int64)
        if rows.restarts is not None:
            restarted = positions - segments * np.repeat(rows.segment_starts * rows.restarts, lengths)
        if rows.order is not None:
            segments[rows.offsets[1:] - 1] = 2
    if rows.cls_last is not None:
        segments = np.zeros(len(rows.tokens), dtype=np.int64)
        segments[offsets[1:][np.repeat(rows.cls_last, group)] - 1] = 2

    if rows.languages is not None:
        second = _second_text_rows(lengths, group) if group > 1 or segments is None else segments
        by_token = np.repeat(rows.languages, np.diff(rows.offsets), axis=0)
        languages = np.take_along_axis(by_token, second[:, None], axis=1)[:, 0]

    def to_tensor(array: NDArray[np.generic], dtype: type[np.generic] = np.int64) -> torch.Tensor:
        return torch.from_numpy(array.astype(dtype))

    on_host = Batch(
        tokens=to_tensor(rows.tokens),
        cu_seqlens=to_tensor(offsets, np.int32),
        max_length=int(lengths.max(initial=0)),
        positions=to_tensor(positions),
        target_positions=to_tensor(rows.target_positions),
        target_ids=to_tensor(rows.target_ids),
        segments=None if segments is None else to_tensor(segments),
        languages=None if languages is None else to_tensor(languages),
        restarted=None if restarted is None else to_tensor(restarted),
        pair_labels=None if rows.pair_label is None else to_tensor(rows.pair_label),
        order=None if rows.order is None else to_tensor(rows.order),
        reversed_rows=None if rows.reversed_rows is None else to_tensor(rows.reversed_rows, np.bool_),
        numbers=to_tensor(np.arange(first_number * group, first_number * group + len(offsets) - 1)),
        group=group,
        rates=None if rows.rates is None else to_tensor(rows.rates, np.float32),
        maskable=None if rows.maskable is None else to_tensor(rows.maskable),
        causal=_all_causal(rows),
        corrupted=_corrupted_forms(rows, first_number),
    )
    if rows.holes is not None and len(rows.holes):
        return _without_unlearned_rows(on_host, rows, group).to(device)
    return on_host.to(device)


def _corrupted_forms(rows: Samples, first_number: int) -> Batch | None:
    """Return the rows' corrupted forms on the host; None if they have none."""
    if rows.corrupted is None or rows.corrupted_offsets is None:
        return None
    lengths = np.diff(rows.corrupted_offsets).tolist()
    forms = batch_without_targets(torch.from_numpy(rows.corrupted.astype(np.int64)), lengths)
    return replace(forms, numbers=torch.arange(first_number, first_number + len(lengths)))


def _all_causal(rows: Samples) -> bool:
    """Return whether the rows are causal: either all rows of a batch are or none, because they are of one phase."""
    if rows.causal is None or not len(rows.causal):
        return False
    assert rows.causal.all(), "some rows of a batch are causal and others not"
    return True


def _without_unlearned_rows(batch: Batch, rows: Samples, group: int) -> Batch:
    """Return the batch of `rows` without losses at holes, and without rows that consist of holes.

    A sentence pair's label is not learned if the pair has a hole.
    """
    assert rows.holes is not None
    kept = np.delete(np.arange(len(rows.tokens)), rows.holes)
    batch = replace(batch, kept=torch.from_numpy(kept))
    inside = np.diff(np.searchsorted(kept, rows.offsets))
    if rows.pair_label is not None:
        whole = np.flatnonzero(inside == np.diff(rows.offsets))
        batch = replace(batch, pair_rows=torch.from_numpy(whole))
    lasting = np.flatnonzero(np.repeat(inside > 0, group))
    if len(lasting) == batch.rows or rows.order is not None:
        return batch
    if not len(lasting):
        return idle_batch(torch.device("cpu"))
    fewer = select_rows(batch, torch.from_numpy(lasting))
    return replace(fewer, kept=None, pair_rows=None) if fewer.loss_token_count == fewer.tokens.numel() else fewer


def _second_text_rows(lengths: NDArray[np.int64], group: int) -> NDArray[np.int64]:
    """Return for each of the T tokens, [T], 0 in the first text of its group, else 1. `group`: texts in a group."""
    number = np.arange(len(lengths)) % group
    return np.repeat(np.minimum(number, 1), lengths)


def _text_offsets(rows: Samples) -> tuple[NDArray[np.int64], int]:
    """Return the start of each text and the end of the last one, [N * G + 1], and the number G of texts in a row."""
    if rows.text_starts is None:
        return rows.offsets, 1
    starts = rows.offsets[:-1, None] + rows.text_starts
    return np.append(starts.ravel(), rows.offsets[-1]), rows.text_starts.shape[1]
