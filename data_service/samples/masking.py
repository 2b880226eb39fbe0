"""Masking, the part of a training objective that runs on the CPU: it chooses the tokens of a row that the model must
predict (targets), and replaces them.

`RowMasking` is the interface for packed rows, `MlmMasking` is masked language modelling; masked diffusion has a file of
its own (`diffusion.py`). `NoMasking` masks nothing; it is for contrastive training, which compares embeddings of texts.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, Self, assert_never

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from data_service.formats import GrowingRecord, StrictRecord
from data_service.rng import UINT32_RANGE, Key, draw_uint32, draw_uint64, stream_key
from data_service.samples.packing import LaidOutRows
from data_service.samples.replacement import Replacement, Vocabulary, replace_targets
from data_service.samples.samples import Samples
from data_service.samples.selection import DrawSlots, Units, select_by_draw_count, select_units
from data_service.samples.similar_words import SimilarWords, replace_words
from data_service.samples.spans import LengthDistribution, SpanRule, ngram_lengths, select_spans, span_lengths
from data_service.types import Level


@dataclass(frozen=True)
class MaskingTables:
    """Tables that a masking may need. Each is None if the spec's masking does not need it.

    Attributes:
        starts_word: [vocab_size] bool, which pieces begin a word, if whole words are masked. It is used for blocks that
            do not store where words begin.
        unigram: [vocab_size] int64, token counts of the corpora, if random replacements are drawn by frequency.
        similar: table of similar words, if words are replaced by similar ones.
    """

    starts_word: NDArray[np.bool_] | None = None
    unigram: NDArray[np.int64] | None = None
    similar: SimilarWords | None = None


NO_TABLES = MaskingTables()


@dataclass(frozen=True)
class MaskableRows:
    """Packed rows before their targets are chosen.

    Attributes:
        rows: tokens of the rows; a masking overwrites them in place.
        units: units that may be chosen: single tokens, or words if the masking needs them.
        slots: range of each row's random draws.
        vocabulary: ids that may replace targets.
        key: random key of the block in this masking epoch.
        tables: further tables that the masking needs.
        rates: [N] float64, share of each row's tokens to predict, if it changes from row to row (`Annealing`); None:
            the masking's `rate`.
        sentences: unsorted offsets in the rows' text at which sentences begin, some perhaps twice; None if the masking
            does not need them.
    """

    rows: LaidOutRows
    units: Units
    slots: DrawSlots
    vocabulary: Vocabulary
    key: Key
    tables: MaskingTables = NO_TABLES
    rates: NDArray[np.float64] | None = None
    sentences: NDArray[np.int64] | None = None


class RowMasking(StrictRecord, ABC):
    """The masking of packed rows: it chooses the targets and replaces them.

    A subclass has a `unit`: "token", or a larger unit. Its random draws depend only on `MaskableRows.key`.

    Attributes:
        kind: name of the masking in a `StreamSpec`.
    """

    kind: str

    @property
    def unit_level(self) -> Level | None:
        """Units that are chosen whole: "word", "phrase" or "entity"; None for single tokens."""
        return None

    @property
    def reads_sentences(self) -> bool:
        """Whether `mask` needs `MaskableRows.sentences`."""
        return False

    @property
    def makes_corrupted_form(self) -> bool:
        """Whether rows get a corrupted form, which an encoder reads (`Samples.corrupted`)."""
        return False

    def epoch_of_draws(self, epoch: int) -> int:
        """Return the epoch whose random draws are used in `epoch`; the same number means the same masks."""
        return epoch

    def draw_slots(self, edges: NDArray[np.int64], first_row: int) -> DrawSlots:
        """Return the range of each row's random draws, by default one draw for each token of its text. Arguments as for
        `DrawSlots.for_rate`."""
        return DrawSlots(edges, first_row)

    @abstractmethod
    def expected_target_count(self, length: int, maskable: int) -> float:
        """Return the mean number of targets in a row of `length` tokens. `maskable`: number that are not special."""

    def max_target_count(self, tokens: int) -> float:
        """Return the largest possible number of targets in a row of `tokens` tokens, by default all."""
        return tokens

    @abstractmethod
    def mask(self, rows: MaskableRows) -> Samples:
        """Choose the targets and replace them in `rows`; return the rows with their targets."""


class DeterministicMasking(StrictRecord):
    """A masking without random draws, so all epochs have the same rows."""

    @property
    def unit(self) -> Literal["token"]:
        """The unit of prediction: single tokens."""
        return "token"

    def epoch_of_draws(self, epoch: int) -> int:
        """Return 0: all epochs have the same rows."""
        return 0


class NoMasking(DeterministicMasking):
    """A masking without targets, for contrastive training."""

    kind: Literal["none"] = "none"

    def expected_target_count(self, length: int, maskable: int) -> float:
        """Return the number of targets in a row: 0."""
        return 0.0


MaskingUnit = Literal["token", "whole_word", "ngram", "span", "phrase", "entity"]
_MAX_NGRAM_WORDS, _MAX_SPAN_WORDS, _SPAN_LENGTH_P = 3, 10, 0.2  # defaults of `longest` (n-grams, spans) and `span_p`


class MlmMasking(RowMasking, GrowingRecord):
    """Masked language modelling (Devlin et al. 2019, section 3.1; Liu et al. 2019, section 4.1).

    Attributes:
        rate: share of a row's maskable tokens to predict.
        unit: mask tokens independently; all pieces of a word together (BERT's whole words); n-grams of 1 to
            `longest` words, n drawn with probability proportional to 1 / n, never overlapping (Lan et al. 2019,
            section 3.1; google-research/albert); or spans of 1 to `longest` words, their length geometric with
            `span_p`, overlapping and adjacent ones merged and replaced alike (Joshi et al. 2020, section 3.1).
            Words are never cut: facebookresearch/SpanBERT cuts the last one at the budget, the paper does not.
            In a corpus that was built with a lexicon also: whole entities, or whole phrases and entities, besides
            single tokens between them (Sun et al. 2019, section 3.2).
        longest: number of words in the longest n-gram (null: 3) or span (null: 10).
        ngram_weights: weights of n-grams of 1, 2, ... words, instead of `longest` (MacBERT: 0.4, 0.3, 0.2, 0.1).
        span_p: parameter p of the geometric distribution of span lengths (null: 0.2).
        copies: "dynamic" draws new masks every epoch; a number k draws k masks of each row and uses them in rotation.
        replace: shares of targets replaced by the mask token, by a random token, and so on.
        count: number of targets in a row of n maskable tokens. "stochastic": floor(rate * n + u), u uniform in [0, 1)
            (fairseq), whose mean is exact; "bert": max(1, round(rate * n)), halves to even; "ceil":
            ceil(rate * n) (SpanBERT); "drawn": BERT's number of positions, drawn with replacement, so that
            distinct ones are somewhat fewer (google-research/electra); only with unit token.
        count_special: whether n counts all tokens of the row, special ones included, though these are never targets: 77
            targets in a row of 512 instead of 76 (google-research/bert, electra, albert; microsoft/DeBERTa).
        max_predictions: largest number of targets in a row (BERT: 20 at length 128); None for no limit.
    """

    later_fields: ClassVar = ("ngram_weights",)

    kind: Literal["mlm"] = "mlm"
    rate: float = Field(default=0.15, gt=0, le=0.8)
    unit: MaskingUnit = "token"
    longest: PositiveInt | None = None
    span_p: float | None = Field(default=None, gt=0, lt=1)
    ngram_weights: tuple[PositiveFloat, ...] | None = Field(default=None, min_length=1, max_length=64)
    copies: Literal["dynamic"] | PositiveInt = "dynamic"
    replace: Replacement = Replacement()
    count: Literal["stochastic", "bert", "ceil", "drawn"] = "stochastic"
    count_special: bool = False
    max_predictions: PositiveInt | None = None

    @model_validator(mode="after")
    def _check_combination(self) -> Self:
        if self.longest is not None and self.unit not in ("ngram", "span"):
            raise ValueError(f"longest needs `unit: ngram` or `unit: span`; leave longest out with `unit: {self.unit}`")
        if self.span_p is not None and self.unit != "span":
            raise ValueError(f"span_p needs `unit: span`; leave span_p out with `unit: {self.unit}`")
        if self.ngram_weights is not None and (self.unit != "ngram" or self.longest is not None):
            raise ValueError("ngram_weights need `unit: ngram`, and cannot be combined with longest")
        if self.replace.word_shares and self.unit_level is None:
            named = " and ".join(self.replace.word_shares)
            raise ValueError(f"a share of {named} words replaces whole words; choose another unit than {self.unit}")
        if self.count == "drawn" and self.unit != "token":
            raise ValueError(f"`count: drawn` needs `unit: token`; choose another count with `unit: {self.unit}`")
        return self

    @property
    def unit_level(self) -> Level | None:
        """Units that are masked whole: "word", "phrase" or "entity"; None for single tokens."""
        match self.unit:
            case "token":
                return None
            case "phrase" | "entity":
                return self.unit
            case _:
                return "word"

    def epoch_of_draws(self, epoch: int) -> int:
        """Return the epoch whose masks are used in `epoch`; see `copies`."""
        return epoch if self.copies == "dynamic" else epoch % self.copies

    def draw_slots(self, edges: NDArray[np.int64], first_row: int) -> DrawSlots:
        return DrawSlots.for_rate(edges, first_row, self.rate)

    def expected_target_count(self, length: int, maskable: int) -> float:
        wanted = self.rate * (length if self.count_special else maskable)
        if self.count == "ceil":
            wanted = math.ceil(wanted)
        elif self.count != "stochastic":
            wanted = max(1, round(wanted))
        wanted = min(wanted, maskable, self.max_predictions or maskable)
        if self.count == "drawn" and maskable:  # the mean number of distinct positions in draws with replacement
            wanted = maskable * (1 - (1 - 1 / maskable) ** wanted)
        return wanted

    def max_target_count(self, tokens: int) -> float:
        return min(self.rate * tokens + 1, self.max_predictions or tokens)

    def mask(self, rows: MaskableRows) -> Samples:
        assert self.replace.random_from == "vocabulary" or rows.tables.unigram is not None
        laid_out, units, slots, key = rows.rows, rows.units, rows.slots, rows.key
        vocabulary, similar = rows.vocabulary, rows.tables.similar
        sizes = units.sizes
        maskable = np.diff(units.edges) if sizes is None else np.diff(np.append(0, np.cumsum(sizes))[units.edges])
        counted = np.diff(laid_out.offsets) if self.count_special else maskable
        wanted = (self.rate if rows.rates is None else rows.rates) * counted
        counts = round_target_counts(self, wanted, maskable, slots.first_row, purpose_key(key, "counts"))
        # Each target needs a draw. Only rows of almost nothing but separators have fewer draws than targets.
        counts = np.minimum(counts, slots.draws_per_row)
        chosen = np.flatnonzero(_select_units(laid_out, units, counts=counts, slots=slots, masking=self, key=key))
        text = units.token_offsets(chosen)
        exact = sizes is None and self.count != "drawn"
        per_row = counts if exact else np.diff(np.searchsorted(text, laid_out.edges))
        positions = laid_out.token_indices(text, per_row)
        target_ids = laid_out.tokens[positions]
        draws = _row_draws(per_row, slots, purpose_key(key, "replacements"))
        if self.replace.similar:
            assert similar is not None  # `Corpora` provides the table
            assert sizes is not None
            laid_out.tokens[positions] = replace_words(
                target_ids, sizes[chosen], draws, self.replace, vocabulary, similar
            )
        else:
            leaders = _first_targets_of_runs(positions) if self.unit == "span" else None
            laid_out.tokens[positions] = replace_targets(target_ids, draws, leaders, self.replace, vocabulary)
        return Samples(laid_out.tokens, laid_out.offsets, positions, target_ids)


def round_target_counts(
    masking: MlmMasking,
    unrounded_counts: NDArray[np.float64],
    maskable: NDArray[np.int64],
    first_row: int,
    key: Key,
) -> NDArray[np.int64]:
    """Return [N] int64, the number of targets in each row, rounded and limited as `masking` says.

    `unrounded_counts`: [N] float64, rate times number of tokens. `maskable`: [N] int64, number of tokens of each row
    that can be targets. `first_row`: number of the first row in its block.
    """
    match masking.count:
        case "stochastic":
            uniform = draw_uint32(key, first_row, first_row + len(unrounded_counts)) / UINT32_RANGE
            counts = np.floor(unrounded_counts + uniform).astype(np.int64)
        case "bert" | "drawn":
            counts = np.maximum(np.rint(unrounded_counts), 1).astype(np.int64)
        case "ceil":
            counts = np.ceil(unrounded_counts).astype(np.int64)
        case _:
            assert_never(masking.count)
    if masking.max_predictions is not None:
        counts = np.minimum(counts, masking.max_predictions)
    possible: NDArray[np.int64] = np.minimum(counts, maskable)
    return possible


def _select_units(
    rows: LaidOutRows,
    units: Units,
    counts: NDArray[np.int64],
    slots: DrawSlots,
    masking: MlmMasking,
    key: Key,
) -> NDArray[np.bool_]:
    """Return [U] bool, whether each unit is chosen, so that its tokens become targets."""
    match masking.unit:
        case "token" | "whole_word" | "phrase" | "entity":
            if masking.count == "drawn":
                return select_by_draw_count(units, counts, slots, purpose_key(key, "drawn"))
            return select_units(units, counts, slots, purpose_key(key, "targets"))
        case "ngram":
            weights, longest = masking.ngram_weights, masking.longest or _MAX_NGRAM_WORDS
            lengths = ngram_lengths(longest) if weights is None else LengthDistribution.from_weights(np.array(weights))
            rule = SpanRule(lengths, overlap=False)
        case "span":
            lengths = span_lengths(masking.span_p or _SPAN_LENGTH_P, masking.longest or _MAX_SPAN_WORDS)
            rule = SpanRule(lengths, overlap=True)
        case _:
            assert_never(masking.unit)
    return select_spans(units, rows.separators, counts, slots, rule, purpose_key(key, f"{masking.unit}s"))


def _row_draws(targets_per_row: NDArray[np.int64], slots: DrawSlots, key: Key) -> NDArray[np.uint64]:
    """Return [M] uint64, a random draw for each target. Target r of a row gets draw r of the row."""
    words = draw_uint64(key, int(slots.edges[0]), int(slots.edges[-1]))
    before = np.cumsum(targets_per_row) - targets_per_row
    shift = np.repeat(slots.edges[:-1] - slots.edges[0] - before, targets_per_row)
    return words[shift + np.arange(len(shift))]


def _first_targets_of_runs(positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return [M] int64: for each target the index of the first target in its run of adjacent targets."""
    starts = np.flatnonzero(np.diff(positions, prepend=-2) != 1)
    return np.repeat(starts, np.diff(np.append(starts, len(positions))))


def purpose_key(key: Key, purpose: str) -> Key:
    """Derive a random key for one purpose, such as "targets", from a block's key, so that purposes are independent."""
    return stream_key(key.hex(), purpose)
