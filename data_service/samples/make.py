"""Makes training rows from a block: cuts it, adds special tokens, and masks the rows, as the stream's spec says."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from data_service.rng import Key, stream_key
from data_service.samples.lane_rows import lane_text_ranges, permuted_rows
from data_service.samples.lanes import LaneRows
from data_service.samples.masking import NO_TABLES, MaskableRows, MaskingTables, NoMasking, RowMasking
from data_service.samples.next_token import NextToken, next_token_samples
from data_service.samples.packing import RowCuts, lay_out
from data_service.samples.pairs import Translations
from data_service.samples.permutation_lm import PermutedPrediction
from data_service.samples.samples import Samples
from data_service.samples.selection import excluded_token_offsets, token_units, word_units
from data_service.samples.spec import StreamSpec
from data_service.samples.texts import text_rows
from data_service.types import Block

CutRows = RowCuts | LaneRows
"""The rows into which a block is cut: their boundaries, without tokens."""


def cut_block(block: Block, spec: StreamSpec, key: Key, source: int = 0) -> CutRows:
    """Return where a block of source number `source` is cut into rows.

    `key`: random key (`cutting_key`), for inputs with random row boundaries.
    """
    return spec.input_for_source(source).cut(block, spec.length, key)


def row_text_ranges(
    block: Block, rows: CutRows, spec: StreamSpec, key: Key
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return which text of a block its rows hold, as three arrays [S] int64, row after row: row, first token in the
    block, and the one after the last.

    `key`: random key of this block in this masking epoch (`masking_key`), for inputs with random segments.
    """
    if isinstance(rows, LaneRows):
        return lane_text_ranges(block, rows, spec.special, key)
    return rows.text_ranges()


def token_ranges_of_row(block: Block, rows: CutRows, row: int, spec: StreamSpec, key: Key) -> tuple[range, ...]:
    """Return the token ranges of the block that row number `row` holds, in order. `key`: as for `row_text_ranges`."""
    of_row, starts, stops = row_text_ranges(block, rows, spec, key)
    mine = of_row == row
    return tuple(range(*ends) for ends in zip(starts[mine].tolist(), stops[mine].tolist(), strict=True))


def make_rows(
    block: Block,
    rows: CutRows,
    start: int,
    stop: int,
    spec: StreamSpec,
    key: Key,
    tables: MaskingTables = NO_TABLES,
    source: int = 0,
    rates: NDArray[np.float64] | None = None,
) -> Samples:
    """Return rows `start` to `stop - 1` of a block, masked and ready to train on.

    Args:
        block, rows: the block, and its row boundaries from `cut_block`.
        start, stop: range of the rows to make. A row is the same in any range.
        spec: spec of the stream.
        key: random key of this block in this masking epoch; see `masking_key`.
        tables: further tables that the spec's masking needs.
        source: number of the source that the block belongs to.
        rates: [N] float64, masking rate of each row, if rows differ.
    """
    if isinstance(rows, LaneRows):
        assert isinstance(spec.masking, PermutedPrediction)  # checked by `StreamSpec`
        return permuted_rows(
            block, rows, start, stop, spec.masking, spec.special, spec.never_masked, key, tables.starts_word
        )
    if isinstance(spec.masking, NoMasking):
        found = text_rows(block, rows, start, stop, spec.special, spec.layout)
    else:
        found = _packed_samples(block, rows, start, stop, spec, key, tables, rates)
    return _add_languages(found, spec, source)


def _packed_samples(
    block: Block,
    rows: RowCuts,
    start: int,
    stop: int,
    spec: StreamSpec,
    key: Key,
    tables: MaskingTables,
    rates: NDArray[np.float64] | None,
) -> Samples:
    """Return rows `start` to `stop - 1` with targets, segments and labels, and the holes left by removed documents."""
    text = rows.text(block, start, stop)
    laid_out = lay_out(text, rows, start, stop, spec.special)
    fixed = excluded_token_offsets(text, spec.never_masked)
    masking, starts_word = spec.masking, tables.starts_word
    if isinstance(masking, NextToken):
        samples = next_token_samples(laid_out, fixed)
    else:
        densest = spec.masking_at_highest_rate
        assert isinstance(masking, RowMasking)
        assert isinstance(densest, RowMasking)
        # `Corpora` provides `starts_word` for every masking of whole units.
        assert masking.unit_level is None or starts_word is not None
        slots = densest.draw_slots(rows.edges[start : stop + 1], start)
        units, sentences = token_units(laid_out.edges, fixed), None
        if starts_word is not None or masking.reads_sentences:
            sentences = rows.sentence_starts(block, start, stop)
        if starts_word is not None:
            assert sentences is not None
            stored = None if masking.unit_level is None else block.unit_starts(masking.unit_level)
            begins = starts_word[text] if stored is None else rows.select_tokens(stored, start, stop)
            units = word_units(begins, laid_out.edges, fixed, separator_offsets=sentences)
        vocabulary = spec.vocabulary
        if tables.unigram is not None:
            vocabulary = replace(vocabulary, counts=tables.unigram[vocabulary.ordinary])
        samples = masking.mask(MaskableRows(laid_out, units, slots, vocabulary, key, tables, rates, sentences))
    samples = rows.add_segment_labels(samples, start, stop)
    if block.removed is None:
        return samples
    return replace(samples, holes=laid_out.hole_indices(rows.select_tokens(block.removed, start, stop)))


def _add_languages(samples: Samples, spec: StreamSpec, source: int) -> Samples:
    """Return `samples`, rows of one source, with the arrays added that all rows of the stream must have.

    If some rows of the stream are translations, all rows have segment starts. If the model has languages, all rows have
    language numbers.
    """
    if isinstance(spec.input, Translations) and samples.segment_starts is None:
        ends = np.diff(samples.offsets).astype(np.int32)
        samples = replace(samples, segment_starts=ends, restarts=np.zeros(samples.rows, dtype=np.bool_))
    if not spec.languages:
        return samples
    numbers = [spec.languages.index(name) for name in spec.sources[source].languages]
    both = np.array([numbers[0], numbers[-1]], dtype=np.uint16)
    return replace(samples, languages=np.tile(both, (samples.rows, 1)))


def masking_key(spec: StreamSpec, source: int, block: int, epoch: int) -> Key:
    """Return the random key for masking a block in epoch `epoch` of its source. Epochs with the same masks share it."""
    fingerprint = spec.sources[source].manifest_fingerprint
    return stream_key("rows", spec.seed, spec.masking.epoch_of_draws(epoch), fingerprint, spec.split, block)


def cutting_key(spec: StreamSpec, source: int, block: int, epoch: int) -> Key:
    """Return the random key for cutting a block into rows in epoch `epoch` of its source."""
    fingerprint = spec.sources[source].manifest_fingerprint
    copy = epoch % spec.input.cut_count
    return stream_key("structure", spec.seed, copy, fingerprint, spec.split, block)
