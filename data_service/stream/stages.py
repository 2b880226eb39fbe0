"""Stages: where in each source a phase begins, and how many rows the phase takes from there.

Without stages every phase starts again, with another pass over each source. With stages
(`StreamSpec.stages`) each phase continues the sources' row sequences where the previous phase ended: no text is
repeated before all text has been read, whatever the lengths, batches and weights of the phases. For that, a stage takes
from each source one contiguous range of rows, as long as the source's share, and its last window ends with the stage.

Shares are shares of text tokens. If batches count samples, each row of a source counts as the source's mean number of
tokens per row. If batches count tokens, rows count with their own lengths, rounded to whole rows. If the next stage
cuts rows of another length, it continues in the same block with its first row that begins at or after the end of the
last stage, so less than a row is left out.

A stage is computed from the spec and the corpora, without reading the data of earlier stages, except one block of each
source where the row length changes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache as remembered

import numpy as np
from numpy.typing import NDArray

from data_service.errors import PlanError
from data_service.samples.make import CutRows, cut_block, cutting_key
from data_service.samples.packing import RowCuts
from data_service.samples.pairs import OrderedPairs
from data_service.samples.spec import Stage, StreamSpec
from data_service.stream.counts import RowCounter, RowCounts
from data_service.stream.mixture import fill_weights, round_shares, source_weights
from data_service.stream.plan import SourceRowSequence, StageSourceRows, StreamPlan
from data_service.stream.sources import Corpora
from data_service.stream.token_axis import LineTokens, measure_lines
from data_service.types import Block

RowStarts = Callable[[int, int, int, int], NDArray[np.int64]]
"""(row length, source, block, reading) -> [N] int64, the token of the block at which each of its rows begins."""


@dataclass(frozen=True)
class StageInputs:
    """What must be known of the corpora to compute stages.

    Attributes:
        text: number of tokens of text of each source.
        row_lines: function that returns each source's row sequence for a given row length.
        line_tokens_at_length: function that returns these sequences, measured in tokens, for stages in tokens.
        block_row_starts: function that returns the tokens of a block at which its rows begin.
    """

    text: tuple[int, ...]
    row_lines: Callable[[int], Sequence[SourceRowSequence]]
    line_tokens_at_length: Callable[[int], Sequence[LineTokens]]
    block_row_starts: RowStarts


def make_plan(corpora: Corpora, counts: tuple[RowCounts, ...], counter: RowCounter) -> StreamPlan:
    """Return the plan of the corpora's spec. `counter` counts the rows of earlier stages, if the spec has stages.

    Raises:
        PlanError: as in `StreamPlan` and `last_stage_rows`; or a source has no text.
        CorpusError, StoreError: a block cannot be read.
    """
    spec = corpora.spec
    if not spec.stages:
        return StreamPlan(spec, corpora.tables, counts)

    @remembered
    def row_counts(length: int) -> tuple[RowCounts, ...]:
        if length == spec.length:
            return counts
        return counter.count_rows(corpora.with_row_length(length))

    @remembered
    def lines_at_length(length: int) -> tuple[SourceRowSequence, ...]:
        return tuple(SourceRowSequence(spec, source, rows) for source, rows in enumerate(row_counts(length)))

    @remembered
    def line_tokens(length: int) -> tuple[LineTokens, ...]:
        there = corpora.with_row_length(length)
        return measure_lines(there.spec, lines_at_length(length), row_counts(length), counter.measure_rows(there))

    def row_starts_in_block(length: int, source: int, block: int, reading: int) -> NDArray[np.int64]:
        there = corpora.with_row_length(length).spec
        text = corpora.read_source_block(source, block)
        return row_starts(text, cut_block(text, there, cutting_key(there, source, block, reading), source), there)

    text = tuple(int(table.tokens.sum()) for table in corpora.tables)
    for source, size in zip(spec.sources, text, strict=True):
        if not size:
            raise PlanError(
                f"source {source.name} ({source.uri}) has no text in its {spec.split} split",
                remedy="leave the source out, or build it from more text",
            )
    share = last_stage_rows(spec, StageInputs(text, lines_at_length, line_tokens, row_starts_in_block))
    return StreamPlan(spec, corpora.tables, counts, share)


def row_starts(block: Block, rows: CutRows, spec: StreamSpec) -> NDArray[np.int64]:
    """Return [N] int64, the token of a block's text at which each of its rows begins, ascending.

    A row of swapped segments begins with its second segment, which precedes the first in the text. A random second
    segment comes from another document, so it never directly precedes the first in the same document.
    """
    assert isinstance(rows, RowCuts)  # stages and lanes exclude each other
    if rows.segments is None:
        return rows.edges[:-1]
    if not isinstance(spec.input, OrderedPairs):
        return rows.segments.starts[:, 0]
    (first, second), sizes = rows.segments.starts.T, rows.segments.sizes[:, 1]
    follows = (second + sizes == first) & (sizes > 0) & ~np.isin(first, block.sentences[block.documents])
    starts: NDArray[np.int64] = np.where(follows, second, first)
    return starts


def last_stage_rows(spec: StreamSpec, rows: StageInputs) -> StageSourceRows:
    """Return the rows that the last stage of `spec` takes.

    Raises PlanError: a stage would read a source more often than allowed, or its share of a source is less than a row.
    """
    *_, share = rows_by_stage(spec, rows)
    return share


def rows_by_stage(spec: StreamSpec, rows: StageInputs) -> Iterator[StageSourceRows]:
    """Yield the rows that each stage of `spec` takes, in order. Raises the errors of `last_stage_rows`."""
    # For each source, the row length of its latest stage, and the number of rows of that length before its end.
    reached = [(spec.stages[0].length, 0)] * len(spec.sources)
    for stage in spec.stages:
        begins = tuple(_convert_row(rows, source, *at, stage.length) for source, at in enumerate(reached))
        weights = stage_weights(spec, stage, rows.text)
        share = StageSourceRows(begins, _stage_quotas(stage, weights, begins, rows))
        _check_stage(spec, stage, weights, share, rows)
        yield share
        reached = [
            (stage.length, begin + stage.epochs * quota) if quota else at
            for at, begin, quota in zip(reached, begins, share.quotas, strict=True)
        ]


def stage_weights(spec: StreamSpec, stage: Stage, text_tokens: Sequence[int]) -> tuple[float, ...]:
    """Return the weight of each source in a stage, as a share of its tokens of text. The weights add up to 1."""
    temperature = stage.temperature or spec.temperature
    if None in stage.weights:
        weights: Sequence[float] = fill_weights(
            stage.weights, spec.sources, text_tokens, temperature, spec.translations
        )
    else:
        own = [weight for weight in stage.weights if weight is not None]
        weights = own or source_weights(spec.sources, text_tokens, temperature, spec.translations) or text_tokens
    return tuple(weight / sum(weights) for weight in weights)


def _stage_quotas(stage: Stage, weights: Sequence[float], begins: Sequence[int], rows: StageInputs) -> tuple[int, ...]:
    """Return the number of rows that an epoch of the stage takes from each source."""
    if stage.in_tokens:
        parts = round_shares(weights, stage.units)
        return tuple(
            line.first_row_at_token(line.tokens_before(begin) + part) - begin
            for line, begin, part in zip(rows.line_tokens_at_length(stage.length), begins, parts, strict=True)
        )
    lines = rows.row_lines(stage.length)
    each = [weight * line.rows_per_round / size for weight, line, size in zip(weights, lines, rows.text, strict=True)]
    return tuple(round_shares(each, stage.units))


def _convert_row(rows: StageInputs, source: int, length: int, row: int, new_length: int) -> int:
    """Return the row of a source's sequence at row length `new_length` that corresponds to row `row` at `length`.

    It is the first row that begins at the same token of the text or after it.
    """
    if length == new_length:
        return row
    line = rows.row_lines(length)[source]
    epoch, rest = line.reading_of_row(row)
    blocks, ends = line.shuffled_blocks(epoch)
    block = int(blocks[np.searchsorted(ends, rest, side="right")])
    begun = rest - (line.row_number_in_line(epoch, block, 0) - line.first_row_of_reading(epoch))
    if not begun:
        return rows.row_lines(new_length)[source].row_number_in_line(epoch, block, 0)
    token = rows.block_row_starts(length, source, block, epoch)[begun]
    behind = int(np.searchsorted(rows.block_row_starts(new_length, source, block, epoch), token))
    return rows.row_lines(new_length)[source].row_number_in_line(epoch, block, behind)


def _check_stage(
    spec: StreamSpec, stage: Stage, weights: Sequence[float], share: StageSourceRows, rows: StageInputs
) -> None:
    """Raise PlanError if the stage takes too little or too much of a source (see `last_stage_rows`)."""
    for source, (weight, quota) in enumerate(zip(weights, share.quotas, strict=True)):
        corpus, line = spec.sources[source], rows.row_lines(stage.length)[source]
        name, phase = f"source {corpus.name} ({corpus.uri})", f"phase {stage.phase}"
        if weight and not quota:
            raise PlanError(
                f"{name} has a share of {weight:.2g} in {phase}, which is less than one of its {stage.units:,} "
                f"{'tokens' if stage.in_tokens else 'rows'}",
                remedy="raise its weight, or set its weight to 0",
            )
        reading, most = line.rows_per_round / line.structures, stage.most_readings
        before, end = share.begins[source] / reading, (share.begins[source] + stage.epochs * quota) / reading
        if weight and most is not None and end > most:
            raise PlanError(
                f"{name} has {rows.text[source]:,} tokens and would be read {_round_up(end):.2f} times by the end of "
                f"{phase}, more than most_readings ({most:g}) allows",
                remedy=f"{_weight_remedy(weight, (most - before) / (end - before))}, give more text, shorten the phase "
                f"or set phases.{stage.phase}.mixture.most_readings to {_round_up(end):.2f} or more",
            )


def _round_up(readings: float) -> float:
    """Return `readings` rounded up to hundredths, so that the number is large enough as a limit."""
    return float(np.ceil(100 * readings) / 100)


def _weight_remedy(weight: float, part: float) -> str:
    """Return the remedy for a weight that must shrink to the fraction `part` of its value."""
    if part <= 0 or weight == 1:
        return "leave it out of this phase"
    return f"give it at most {np.floor(1000 * weight * part) / 10:.1f} % of the tokens of this phase"
