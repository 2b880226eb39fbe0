"""The corrupted form of a row that a denoising autoencoder reads, to write the row itself (BART: Lewis et al. 2019).

Two ways of corruption, one after the other (arXiv 1910.13461, section 2.2):

Sentence permutation: the sentences of each document are put in a random order. A row's part of a document counts as
    the document.
Text infilling: spans whose numbers of units are drawn from a Poisson distribution are each replaced by one mask token.
    A span without units puts a mask between two units. So the form does not say how much is missing.

Spans are laid out as follows: lengths are drawn until they make up the row's budget, the last one cut; then the spans
and the units that stay are put in a uniformly random order, as two kinds of beads on a string. So spans never overlap,
and any arrangement is as likely as any other. (facebookresearch/fairseq draws a first word for each span, and spans
that overlap are merged, so somewhat less is hidden.) A span may go on behind a separator, which stays: its mask stands
where it begins.

A row's form is never longer than the row, whose length the model's table of positions limits: spans without units that
outnumber the room made by the others are left out. At the published settings that happens only in rows of a few units.

Shapes: N rows, U units, T tokens of text, P tokens with special ones, K spans.
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

_MAX_SPAN_UNITS = 128  # units in the longest span: at a mean of 16, longer ones have a probability below 1e-60


class Denoising(RowMasking):
    """Text infilling and sentence permutation (Lewis et al. 2019, section 2.2). Every token of a row is a target.

    Attributes:
        rate: share of a row's units that spans cover. The number is rounded up or down at random, so that its mean is
            exact.
        unit: what a span consists of: tokens, or whole words (facebookresearch/fairseq).
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
        """Return the mean number of tokens in the form of a row of `length` tokens, if units are as long as tokens."""
        return length - round(self.rate * (length - SPECIAL_TOKENS_PER_ROW) * (1 - 1 / self.span_mean))

    def mask(self, rows: MaskableRows) -> Samples:
        laid_out = rows.rows
        text = _RowsToInfill.from_rows(laid_out, rows.units)
        targets = np.flatnonzero(text.learned)
        if self.permute_sentences:
            assert rows.sentences is not None  # ensured by `reads_sentences`
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
    """Return [T] uniform 32-bit draws for one purpose, one for each token of the text."""
    edges = rows.slots.edges
    return draw_uint32(purpose_key(rows.key, name), int(edges[0]), int(edges[-1]))


def poisson_lengths(mean: float) -> LengthDistribution:
    """Return the Poisson distribution of a span's units, shifted by 1: a `LengthDistribution` begins with 1."""
    return LengthDistribution.from_weights(np.cumprod(np.append(1.0, mean / np.arange(1, _MAX_SPAN_UNITS))))


def sentence_order(rows: LaidOutRows, sentences: NDArray[np.int64], draws: NDArray[np.uint32]) -> Indices:
    """Return [T]: for each place of the text the offset of the token that stands there once sentences are
    permuted, those of one document of one row among themselves.

    Args:
        rows: rows before masking.
        sentences: offsets in the text at which sentences begin, in any order.
        draws: [T] uniform draws. Those at the first tokens of sentences decide.
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
    """Return [K] int64, the row of each span, and [K] int64, its number of units, which may be 0.

    In each row, spans are taken in the order drawn until they have `budgets` units; the last one is cut. Of those
    without units, at most as many stay as make the row's form no longer than the row.

    Args:
        budgets: [N] int64, number of units to cover.
        lengths: [D] int64, numbers of units that are drawn for the rows, row after row.
        draw_counts: [N] int64, how many of them belong to each row.
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
    """Return [D] int64, the sum of the values before each one in its row. `counts`: [N], number of values in each."""
    total = np.append(0, np.cumsum(values, dtype=np.int64))
    before: NDArray[np.int64] = total[:-1] - np.repeat(total[np.cumsum(counts) - counts], counts)
    return before


@dataclass(frozen=True)
class Spans:
    """K spans of units, those of one row in no order.

    Attributes:
        rows: [K] int64, row of each span.
        starts: [K] int64, number of the first unit of each span; of one without units, of the unit behind it, or of the
            next row's first.
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
        """Put the spans of each row, and the units that stay, in a uniformly random order.

        Args:
            rows, sizes: [K] int64, as in the class; rows ascending. A row has no more spans than they have units.
            unit_counts: [N] int64, number of units in each row.
            draws: [D] uniform draws, row after row, at least one for each unit.
            draw_counts: [N] int64, how many of them belong to each row.
        """
        per_row = np.bincount(rows, minlength=len(unit_counts))
        covered = np.bincount(rows, weights=sizes, minlength=len(unit_counts)).astype(np.int64)
        beads = unit_counts - covered + per_row
        owner, total = np.repeat(np.arange(len(unit_counts)), beads), int(beads.sum())
        shift = np.repeat(np.cumsum(draw_counts) - draw_counts - np.cumsum(beads) + beads, beads)
        mine = draws[shift + np.arange(total)].astype(np.int64)
        # Shuffles the items of each row: its spans and its units outside of spans.
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
        tokens: [P], tokens, special ones included.
        places: [T] int64, indices of the text in them.
        inside: [P] bool, whether a token belongs to a unit.
        first: [P] bool, whether it is its unit's first.
        learned: [P] bool, whether it is a target: all but tokens of the text that are never masked.
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
        """Return the rows with the text in another order; a unit's tokens stay together. Targets are left as they
        were."""
        origin = np.arange(len(self.tokens))
        origin[self.places] = self.places[order]
        return _RowsToInfill(self.tokens[origin], self.places, self.inside[origin], self.first[origin], self.learned)

    def replace_spans(
        self, spans: Spans, edges: NDArray[np.int64], offsets: NDArray[np.int64], mask_id: int
    ) -> tuple[Tokens, NDArray[np.int64]]:
        """Return the tokens after infilling, and the rows' offsets in them.

        Args:
            spans: spans, by numbers of units in this order of the text.
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
        """Return [P] int64, the number of masks that are put before each token: before the first of each of `units`,
        or before the row's last token if its units are at an end."""
        last = offsets[rows + 1] - 1
        starts = np.append(np.flatnonzero(self.first), 0)
        return np.bincount(np.where(units < edges[rows + 1], starts[units], last), minlength=len(self.tokens))
