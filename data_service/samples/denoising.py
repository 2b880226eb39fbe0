"""Corruption of rows for a denoising autoencoder: its encoder reads the corrupted row, its decoder predicts the
original row (BART: Lewis et al. 2019).

Two corruptions are applied in this order (arXiv 1910.13461, section 2.2):

Sentence permutation: the sentences of each document in a row are put in a random order.
Text infilling: spans of units (tokens or words) are each replaced by one mask token. Span lengths have a Poisson
    distribution; a span of length 0 inserts a mask between two units. So masks do not show how much text is missing.

Span lengths are drawn until they add up to the row's budget; the last span is cut to fit. Then the spans and the units
outside spans are put in a uniformly random order. So spans never overlap, and all arrangements are equally likely.
(facebookresearch/fairseq draws a first word for each span and merges spans that overlap, so it hides somewhat less.) A
span may extend past a separator, which is kept; the span's mask is put where the span begins.

A corrupted row is never longer than the original, since the model has a limited number of positions: surplus spans of
length 0 are dropped. At the published settings this happens only in rows of a few units.

Shapes: N rows, U units, T tokens of text, P tokens of text and special tokens, K spans.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from data_service.rng import UINT32_RANGE, draw_uint32
from data_service.samples.masking import MaskableRows, RowMasking, purpose_key
from data_service.samples.packing import SPECIAL_TOKENS_PER_ROW, LaidOutRows
from data_service.samples.samples import Indices, Samples, expand_ranges
from data_service.samples.selection import Units
from data_service.samples.spans import LengthDistribution
from data_service.types import Level, Tokens

_MAX_SPAN_UNITS = 128  # longest span in units; at a mean of 16, longer ones have a probability below 1e-60


class Denoising(RowMasking):
    """Text infilling and sentence permutation (Lewis et al. 2019, section 2.2). Every token of a row is a target.

    Attributes:
        rate: share of a row's units that spans cover. The number of units is rounded at random, so that its mean is
            exact.
        unit: unit of spans: tokens, or whole words (facebookresearch/fairseq).
        span_mean: mean number of units in a span, the Poisson distribution's lambda.
        permute_sentences: whether sentences are put in a random order.
    """

    kind: Literal["denoise"] = "denoise"
    rate: float = Field(default=0.3, gt=0, le=0.8)
    unit: Literal["token", "whole_word"] = "token"
    span_mean: float = Field(default=3.0, ge=1, le=16)
    permute_sentences: bool = True

    @property
    def unit_level(self) -> Level | None:
        return None if self.unit == "token" else "word"

    @property
    def reads_sentences(self) -> bool:
        return self.permute_sentences

    @property
    def makes_corrupted_form(self) -> bool:
        return True

    def expected_target_count(self, length: int, maskable: int) -> float:
        return length

    def mean_form_tokens(self, length: int) -> int:
        """Return the mean number of tokens in the corrupted form of a row of `length` tokens, if words are tokens."""
        return length - round(self.rate * (length - SPECIAL_TOKENS_PER_ROW) * (1 - 1 / self.span_mean))

    def mask(self, rows: MaskableRows) -> Samples:
        laid_out = rows.rows
        text = _RowsToInfill.from_rows(laid_out, rows.units)
        targets = np.flatnonzero(text.learned)
        if self.permute_sentences:
            assert rows.sentences is not None  # given, because `reads_sentences` is true
            text = text.reorder_text(sentence_order(laid_out, rows.sentences, _token_draws(rows, "sentences")))
        spans = self._draw_spans(rows)
        tokens, offsets = text.replace_spans(spans, rows.units.edges, laid_out.offsets, rows.vocabulary.mask)
        causal = np.ones(len(offsets) - 1, dtype=np.bool_)
        return Samples(
            laid_out.tokens,
            laid_out.offsets,
            targets,
            laid_out.tokens[targets],
            causal=causal,
            corrupted=tokens,
            corrupted_offsets=offsets,
        )

    def _draw_spans(self, rows: MaskableRows) -> "Spans":
        first, slots = rows.slots.first_row, rows.slots
        counts = np.diff(rows.units.edges)
        uniform = draw_uint32(purpose_key(rows.key, "budgets"), first, first + len(counts)) / UINT32_RANGE
        budgets = np.floor(self.rate * counts + uniform).astype(np.int64)
        lengths = poisson_lengths(self.span_mean).lengths_from_draws(_token_draws(rows, "lengths")) - 1
        row, sizes = cut_spans_to_budget(budgets, lengths, slots.draws_per_row)
        return Spans.from_sizes(row, sizes, counts, _token_draws(rows, "places"), slots.draws_per_row)


def _token_draws(rows: MaskableRows, name: str) -> NDArray[np.uint32]:
    """Return [T] uniform 32-bit draws, one for each token of the text. `name`: purpose of the draws."""
    edges = rows.slots.edges
    return draw_uint32(purpose_key(rows.key, name), int(edges[0]), int(edges[-1]))


def poisson_lengths(mean: float) -> LengthDistribution:
    """Return the Poisson distribution of span lengths plus 1, since a `LengthDistribution` begins with length 1."""
    return LengthDistribution.from_weights(np.cumprod(np.append(1.0, mean / np.arange(1, _MAX_SPAN_UNITS))))


def sentence_order(rows: LaidOutRows, sentences: NDArray[np.int64], draws: NDArray[np.uint32]) -> Indices:
    """Return [T], a permutation of the text's token offsets in which the sentences of each document in a row are
    shuffled.

    Args:
        rows: rows before masking.
        sentences: offsets in the text at which sentences begin, in any order.
        draws: [T] uniform draws. The draws at the first tokens of sentences decide the order.
    """
    total = int(rows.edges[-1])
    parts = np.unique(np.concatenate([rows.edges[:-1], rows.separators]))
    starts = np.unique(np.concatenate([parts, sentences]))
    starts = starts[starts < total]
    part = np.searchsorted(parts, starts, side="right")
    order = np.lexsort((draws[starts], part))
    return expand_ranges(starts[order], np.diff(starts, append=total)[order])


def cut_spans_to_budget(
    budgets: NDArray[np.int64], lengths: NDArray[np.int64], draw_counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return for each of K spans its row, [K] int64, and its number of units, [K] int64, which may be 0.

    In each row, spans are taken as drawn until they cover `budgets` units; the last one is cut to fit. Spans of length
    0 are dropped if they would make the corrupted row longer than the original.

    Args:
        budgets: [N] int64, number of units to cover.
        lengths: [D] int64, drawn span lengths in units, row after row.
        draw_counts: [N] int64, number of drawn lengths for each row.
    """
    row = np.repeat(np.arange(len(budgets)), draw_counts)
    left = budgets[row] - _row_prefix_sums(lengths, draw_counts)
    used = left > 0
    row, sizes = row[used], np.minimum(lengths, left)[used]
    covered = np.bincount(row, weights=sizes, minlength=len(budgets)).astype(np.int64)
    room = covered - np.bincount(row[sizes > 0], minlength=len(budgets))
    kept = (sizes > 0) | (_row_prefix_sums(sizes == 0, np.bincount(row, minlength=len(budgets))) < room[row])
    return row[kept], sizes[kept]


def _row_prefix_sums(values: NDArray[np.int64] | NDArray[np.bool_], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [D] int64: for each value the sum of the row's earlier values. `counts`: [N], number of values per row."""
    total = np.append(0, np.cumsum(values, dtype=np.int64))
    before: NDArray[np.int64] = total[:-1] - np.repeat(total[np.cumsum(counts) - counts], counts)
    return before


@dataclass(frozen=True)
class Spans:
    """K spans of units, row after row; within a row they are not sorted.

    Attributes:
        rows: [K] int64, row of each span.
        starts: [K] int64, number of each span's first unit. A span of length 0 has the number of the unit after it,
            which may be the next row's first.
        sizes: [K] int64, number of units.
    """

    rows: NDArray[np.int64]
    starts: NDArray[np.int64]
    sizes: NDArray[np.int64]

    @classmethod
    def from_sizes(
        cls,
        rows: NDArray[np.int64],
        sizes: NDArray[np.int64],
        unit_counts: NDArray[np.int64],
        draws: NDArray[np.uint32],
        draw_counts: NDArray[np.int64],
    ) -> "Spans":
        """Arrange the spans of each row, and its units outside spans, in a uniformly random order.

        Args:
            rows, sizes: [K] int64, as the attributes; rows ascending. No row has more spans than units in spans.
            unit_counts: [N] int64, number of units in each row.
            draws: [D] uniform draws, row after row, at least one for each unit.
            draw_counts: [N] int64, number of draws for each row.
        """
        per_row = np.bincount(rows, minlength=len(unit_counts))
        covered = np.bincount(rows, weights=sizes, minlength=len(unit_counts)).astype(np.int64)
        beads = unit_counts - covered + per_row  # [N], numbers of spans and of units outside spans
        owner, total = np.repeat(np.arange(len(unit_counts)), beads), int(beads.sum())
        shift = np.repeat(np.cumsum(draw_counts) - draw_counts - np.cumsum(beads) + beads, beads)
        mine = draws[shift + np.arange(total)].astype(np.int64)
        # Shuffle the items of each row: its spans, and its units outside spans.
        order = np.argsort((owner << 32) | mine, kind="stable")
        first = (np.cumsum(beads) - beads)[rows]
        at = order[first + _row_prefix_sums(np.ones(len(rows), dtype=np.int64), per_row)]
        units = np.ones(total, dtype=np.int64)
        units[at] = sizes
        return cls(rows, (np.cumsum(units) - units)[at], sizes)


@dataclass(frozen=True)
class _RowsToInfill:
    """Rows with special tokens, before infilling.

    Attributes:
        tokens: [P], tokens of the rows, special tokens included.
        places: [T] int64, indices in `tokens` of the text's tokens.
        inside: [P] bool, whether a token belongs to a unit.
        first: [P] bool, whether a token is the first of its unit.
        learned: [P] bool, whether a token is a target: all except text tokens that are never masked.
    """

    tokens: Tokens
    places: NDArray[np.int64]
    inside: NDArray[np.bool_]
    first: NDArray[np.bool_]
    learned: NDArray[np.bool_]

    @classmethod
    def from_rows(cls, rows: LaidOutRows, units: Units) -> "_RowsToInfill":
        places = rows.marked_token_indices(np.ones(int(rows.edges[-1]), dtype=np.bool_))
        every = np.arange(int(units.edges[-1]))
        inside, first = (np.zeros(len(rows.tokens), dtype=np.bool_) for _ in range(2))
        inside[places[units.token_offsets(every)]] = True
        first[places[every if units.starts is None else units.starts]] = True
        learned = np.ones(len(rows.tokens), dtype=np.bool_)
        learned[places] = inside[places]
        return cls(rows.tokens, places, inside, first, learned)

    def reorder_text(self, order: Indices) -> "_RowsToInfill":
        """Return the rows with the text in the given `order`, which keeps units together; `learned` stays."""
        origin = np.arange(len(self.tokens))
        origin[self.places] = self.places[order]
        return _RowsToInfill(self.tokens[origin], self.places, self.inside[origin], self.first[origin], self.learned)

    def replace_spans(
        self, spans: Spans, edges: NDArray[np.int64], offsets: NDArray[np.int64], mask_id: int
    ) -> tuple[Tokens, NDArray[np.int64]]:
        """Return the tokens of all corrupted rows, and the offsets of the rows in them.

        Args:
            spans: spans of units, numbered in the current order of the text.
            edges: [N + 1] int64, numbers of units; row i has units edges[i] to edges[i + 1].
            offsets: [N + 1] int64, offsets of the rows in `tokens`.
            mask_id: id of the mask token.
        """
        some = spans.sizes > 0
        hidden, opens = (np.zeros(int(edges[-1]), dtype=np.bool_) for _ in range(2))
        hidden[expand_ranges(spans.starts[some], spans.sizes[some])] = True
        opens[spans.starts[some]] = True
        unit = np.cumsum(self.first) - 1
        gone, opening = self.inside.copy(), self.first.copy()
        gone[self.inside] = hidden[unit[self.inside]]
        opening[self.first] = opens
        counts = np.where(gone, opening, True).astype(np.int64)
        counts += self._mask_counts(spans.rows[~some], spans.starts[~some], edges, offsets)
        ends = np.cumsum(counts)
        tokens = np.full(int(ends[-1]), mask_id, dtype=self.tokens.dtype)
        tokens[ends[~gone] - 1] = self.tokens[~gone]
        return tokens, np.append(0, ends)[offsets]

    def _mask_counts(
        self,
        rows: NDArray[np.int64],
        units: NDArray[np.int64],
        edges: NDArray[np.int64],
        offsets: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        """Return [P] int64, the number of masks to insert before each token for spans of length 0: before the first
        token of unit `units`, or before the last token of row `rows` if that unit is in the next row."""
        last = offsets[rows + 1] - 1
        starts = np.append(np.flatnonzero(self.first), 0)
        return np.bincount(np.where(units < edges[rows + 1], starts[units], last), minlength=len(self.tokens))
