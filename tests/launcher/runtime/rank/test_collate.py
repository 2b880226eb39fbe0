"""From rows to a batch: every column arrives, and XLNet's rows mean to the model what the data service meant."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from data_service.rng import stream_key
from data_service.samples.lane_rows import permuted_rows
from data_service.samples.lanes import Lanes, lane_rows
from data_service.samples.permutation_lm import PermutedPrediction
from data_service.samples.samples import Samples
from data_service.tokenizers.specials import SpecialIds
from data_service.types import Block
from encoder_core.batch import Batch
from encoder_core.families.xlnet import XlnetConfig
from encoder_core.layers.initialise import initialise
from encoder_core.layers.xlnet_encoder import TwoStreamEncoder
from launcher.runtime.rank.collate import to_batch

CPU = torch.device("cpu")
REUSE, LENGTH, VOCABULARY = 12, 32, 90


def lanes_of(rows: int) -> Samples:
    rng = np.random.default_rng(0)
    sentences = np.append(np.arange(0, 400, 8), 400)
    block = Block(rng.integers(7, VOCABULARY, 400).astype(np.uint16), sentences, np.array([0, 20, 50]))
    found = lane_rows(block, Lanes(packing="lanes", reuse=REUSE), LENGTH)
    config = PermutedPrediction(predict=6)
    special = SpecialIds(cls=0, sep=2, pad=1, mask=4, unk=3, eod=6)
    return permuted_rows(block, found, 0, rows, config, special, tuple(range(7)), stream_key("x"), None)


def test_pairs_without_an_order_have_two_segments() -> None:
    samples = Samples(
        tokens=np.array([1, 5, 2, 6, 2, 1, 7, 2], dtype=np.uint16),
        offsets=np.array([0, 5, 8]),
        target_positions=np.array([1, 6]),
        target_ids=np.array([8, 9], dtype=np.uint16),
        segment_starts=np.array([3, 3], dtype=np.int32),
        pair_label=np.array([1, 0], dtype=np.int8),
    )
    batch = to_batch(samples, CPU)
    assert batch.tokens.dtype == torch.int64
    assert batch.cu_seqlens.tolist() == [0, 5, 8]
    assert batch.max_length == 5
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert batch.segments is not None
    assert batch.segments.tolist() == [0, 0, 0, 1, 1, 0, 0, 0]
    assert batch.pair_labels is not None
    assert batch.pair_labels.tolist() == [1, 0]
    assert batch.order is None
    assert batch.reversed_rows is None


def test_rows_of_lanes_bring_order_direction_and_three_segments() -> None:
    samples = lanes_of(4)
    batch = to_batch(samples, CPU)
    assert samples.order is not None
    assert samples.segment_starts is not None
    assert batch.order is not None
    assert batch.order.tolist() == samples.order.tolist()
    assert batch.reversed_rows is not None
    assert batch.reversed_rows.tolist() == [False, True, False, True]
    assert batch.segments is not None
    for row, second in zip(batch.segments.view(4, LENGTH).tolist(), samples.segment_starts, strict=True):
        assert row == [0] * second + [1] * (LENGTH - 1 - second) + [2]
    assert torch.equal(batch.tokens[batch.target_positions], batch.target_ids)


def examples_of_texts(cls_last: bool | None) -> Samples:
    """Two examples of three texts."""
    return Samples(
        tokens=np.array([1, 5, 2, 1, 6, 7, 2, 1, 2, 1, 8, 9, 2, 1, 2, 1, 5, 2], dtype=np.uint16),
        offsets=np.array([0, 9, 18]),
        target_positions=np.zeros(0, dtype=np.int64),
        target_ids=np.zeros(0, dtype=np.uint16),
        text_starts=np.array([[0, 3, 7], [0, 4, 6]], dtype=np.int32),
        cls_last=None if cls_last is None else np.full(2, cls_last),
    )


def test_texts_of_an_example_become_rows_whose_positions_begin_anew() -> None:
    batch = to_batch(examples_of_texts(None), CPU)
    assert (batch.group, batch.rows) == (3, 6)
    assert batch.cu_seqlens.tolist() == [0, 3, 7, 9, 13, 15, 18]
    assert batch.max_length == 4
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 0, 1, 0, 1, 2, 3, 0, 1, 0, 1, 2]
    assert batch.segments is None
    assert batch.pair_labels is None
    assert batch.target_positions.numel() == 0


def test_a_classification_token_at_the_end_of_a_text_is_a_segment_of_its_own() -> None:
    batch = to_batch(examples_of_texts(True), CPU)
    assert batch.segments is not None
    assert batch.segments.nonzero().ravel().tolist() == [2, 6, 8, 12, 14, 17]
    assert set(batch.segments.tolist()) == {0, 2}


@pytest.mark.long
def test_a_prediction_never_depends_on_tokens_at_or_after_its_place_in_the_order() -> None:
    """Rows of the data service through the two-stream encoder: exact, for every target of a forward and a backward
    row; and it does depend on some token before."""
    samples = lanes_of(2)
    batch = to_batch(samples, CPU)
    config = XlnetConfig(
        family="xlnet", vocab=VOCABULARY, layers=2, hidden=16, heads=2, feed_forward=32, memory=0, dropout=0.0
    )
    torch.manual_seed(0)
    encoder = config.encoder().double().eval()
    initialise(encoder, 0.5)
    before = query_states(encoder, batch)
    assert batch.order is not None
    for number, target in enumerate(batch.target_positions.tolist()):
        row = target // LENGTH
        in_row = torch.arange(2 * LENGTH) // LENGTH == row
        sees = batch.order < batch.order[target]
        hidden = changed(batch, ~(in_row & sees))
        assert torch.equal(query_states(encoder, hidden)[number], before[number])
        shown = changed(batch, in_row & sees)
        assert not torch.allclose(query_states(encoder, shown)[number], before[number])


def changed(batch: Batch, where: torch.Tensor) -> Batch:
    """Other tokens at `where`."""
    return replace(batch, tokens=torch.where(where, (batch.tokens + 11) % VOCABULARY, batch.tokens))


def query_states(encoder: TwoStreamEncoder, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        query = encoder.streams(batch).query
    assert query is not None
    return query
