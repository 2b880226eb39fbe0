"""From a block to training rows: the one place that says what each objective needs."""

from dataclasses import replace
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from data_service.rng import Key, stream_key
from data_service.samples.inputs import Lanes, OrderedPairs, Packed, SegmentPairs, TwoSegments
from data_service.samples.layout import lay_out
from data_service.samples.masking import MlmMasking, mask_rows
from data_service.samples.packing import Rows, pack
from data_service.samples.permuted import PermutedPrediction
from data_service.samples.ragged import Samples
from data_service.samples.selection import Slots
from data_service.samples.units import Units, fixed_positions, token_units, word_units
from data_service.shards.block import Block
from data_service.spec import StreamSpec


def cut(block: Block, spec: StreamSpec) -> Rows:
    """The rows of a block, the same in every epoch."""
    match spec.input:
        case Packed():
            return pack(block, spec.input.packing, spec.length)
        case SegmentPairs() | OrderedPairs() | TwoSegments() | Lanes():
            raise NotImplementedError(spec.input.packing)
        case _:
            assert_never(spec.input)


def make_rows(
    block: Block,
    rows: Rows,
    start: int,
    stop: int,
    spec: StreamSpec,
    key: Key,
    starts_word: NDArray[np.bool_] | None,
    unigram: NDArray[np.int64] | None = None,
) -> Samples:
    """Rows `start` to `stop` of a block, ready to train on.

    Args:
        block: the text.
        rows: where it is cut (`cut`).
        start, stop: which rows; any range gives the same bytes per row.
        spec: the stream's.
        key: names the block and the masking epoch; see `block_key`.
        starts_word: [vocab_size] bool, the tokenizer's word-start table, where words are masked whole.
        unigram: [vocab_size] counts of the corpora's tokens, where random replacements follow them.
    """
    laid_out = lay_out(block.tokens, rows, start, stop, spec.special)
    masking = spec.masking
    match masking:
        case MlmMasking():
            slots = Slots.of(rows.edges[start : stop + 1], start, masking.rate)
            units = _units(block, rows, start, stop, spec, starts_word)
            vocabulary = spec.vocabulary
            if unigram is not None:
                vocabulary = replace(vocabulary, counts=unigram[vocabulary.ordinary])
            return mask_rows(laid_out, units, slots, masking, vocabulary, key)
        case PermutedPrediction():
            raise NotImplementedError(masking.kind)
        case _:
            assert_never(masking)


def block_key(spec: StreamSpec, source: int, block: int, epoch: int) -> Key:
    """The key of one block's draws in an epoch of its source, or of the copy of the masks used in it."""
    fingerprint = spec.sources[source].manifest_fingerprint
    return stream_key("rows", spec.seed, spec.masking.mask_epoch(epoch), fingerprint, spec.split, block)


def _units(
    block: Block, rows: Rows, start: int, stop: int, spec: StreamSpec, starts_word: NDArray[np.bool_] | None
) -> Units:
    first, last = int(rows.edges[start]), int(rows.edges[stop])
    text = block.tokens[first:last]
    edges = rows.edges[start : stop + 1] - first
    fixed = fixed_positions(text, spec.never_masked)
    if starts_word is None:
        return token_units(edges, fixed)
    low, high = np.searchsorted(block.sentences, (first, last))
    return word_units(text, edges, fixed, block.sentences[low:high] - first, starts_word)
