"""Masked language modelling: which tokens are hidden, and what stands in their place."""

from dataclasses import dataclass
from typing import Annotated, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, model_validator

from data_service.rng import Key, draws32, draws64, scale, stream_key
from data_service.samples.layout import LaidOut
from data_service.samples.ragged import Samples, Tokens
from data_service.samples.selection import Slots, select
from data_service.samples.units import Units

_DRAWS = 1 << 32

Share = Annotated[float, Field(ge=0, le=1)]


class _Config(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Replacement(_Config):
    """What stands where a target was: shares of the mask token, a random token, the token itself; sum 1.

    A random token is any ordinary one alike, or drawn by its frequency in the corpora (SpanBERT).
    """

    mask: Share = 0.8
    random: Share = 0.1
    keep: Share = 0.1
    random_from: Literal["vocabulary", "unigram"] = "vocabulary"

    @model_validator(mode="after")
    def _sums_to_one(self) -> Self:
        if abs(self.mask + self.random + self.keep - 1) > 1e-9:
            raise ValueError(f"mask + random + keep is {self.mask + self.random + self.keep:g}, it must be 1")
        return self


class MlmMasking(_Config):
    """Masked language modelling (Devlin et al. 2019, section 3.1; Liu et al. 2019, section 4.1).

    Attributes:
        rate: share of a row's maskable tokens to predict.
        unit: mask tokens independently; all pieces of a word together; n-grams of 1 to `longest` words, n drawn
            with probability proportional to 1 / n (ALBERT, DeBERTa); or spans of 1 to `longest` words, their
            length geometric with `span_p`, adjacent ones merged and replaced alike (SpanBERT).
        longest: words in the longest n-gram (null: 3) or span (null: 10).
        span_p: of the geometric distribution of span lengths.
        copies: "dynamic" draws anew every epoch; a number k draws k masks of each row, used in turn.
        count: targets of a row of n maskable tokens. "stochastic": floor(rate * n + u), u uniform in [0, 1)
            (fairseq), whose mean is exact; "bert": max(1, round(rate * n)), halves to even; "ceil":
            ceil(rate * n) (SpanBERT); "drawn": BERT's number of positions drawn with replacement, each counted
            once (google-research/electra).
        max_predictions: most targets in a row (BERT: 20 at length 128), or None.
    """

    kind: Literal["mlm"] = "mlm"
    rate: float = Field(default=0.15, gt=0, le=0.8)
    unit: Literal["token", "whole_word", "ngram", "span"] = "token"
    longest: PositiveInt | None = None
    span_p: float = Field(default=0.2, gt=0, lt=1)
    copies: Literal["dynamic"] | PositiveInt = "dynamic"
    replace: Replacement = Replacement()
    count: Literal["stochastic", "bert", "ceil", "drawn"] = "stochastic"
    max_predictions: PositiveInt | None = None

    def mask_epoch(self, epoch: int) -> int:
        """The epoch whose masks are used in `epoch`."""
        return epoch if self.copies == "dynamic" else epoch % self.copies


@dataclass(frozen=True)
class Vocabulary:
    """The ids that masking writes.

    Attributes:
        mask: the id of the mask token.
        ordinary: [V] ids of ordinary tokens, ascending, in the corpus's dtype: the random replacements.
    """

    mask: int
    ordinary: Tokens


def budgets(masking: MlmMasking, maskable: NDArray[np.int64], first_row: int, key: Key) -> NDArray[np.int64]:
    """[N] int64 targets of rows with `maskable` [N] tokens each, numbered from `first_row` in their block."""
    wanted = masking.rate * maskable
    if masking.count == "bert":
        counts = np.maximum(np.rint(wanted), 1).astype(np.int64)
    else:
        uniform = draws32(key, first_row, first_row + len(maskable)) / _DRAWS
        counts = np.floor(wanted + uniform).astype(np.int64)
    if masking.max_predictions is not None:
        counts = np.minimum(counts, masking.max_predictions)
    possible: NDArray[np.int64] = np.minimum(counts, maskable)
    return possible


def mask_rows(
    rows: LaidOut, units: Units, slots: Slots, masking: MlmMasking, vocabulary: Vocabulary, key: Key
) -> Samples:
    """Choose targets among `units` and replace them; `key` names the block and the masking epoch."""
    sizes = units.sizes
    maskable = np.diff(units.edges) if sizes is None else np.diff(np.append(0, np.cumsum(sizes))[units.edges])
    counts = budgets(masking, maskable, slots.first_row, _purpose(key, "counts"))
    chosen = np.flatnonzero(select(units, counts, slots, _purpose(key, "targets")))
    text = units.text(chosen)
    per_row = counts if sizes is None else np.diff(np.searchsorted(text, rows.edges))
    positions = rows.places(text, per_row)
    target_ids = rows.tokens[positions]
    rows.tokens[positions] = _replaced(target_ids, per_row, slots, masking.replace, vocabulary, key)
    return Samples(rows.tokens, rows.offsets, positions, target_ids)


def _replaced(
    target_ids: Tokens,
    per_row: NDArray[np.int64],
    slots: Slots,
    replace: Replacement,
    vocabulary: Vocabulary,
    key: Key,
) -> Tokens:
    """What stands in place of the targets. Target r of a row uses the row's slot r."""
    words = draws64(_purpose(key, "replacements"), int(slots.edges[0]), int(slots.edges[-1]))
    before = np.cumsum(per_row) - per_row
    words = words[np.repeat(slots.edges[:-1] - slots.edges[0] - before, per_row) + np.arange(len(target_ids))]
    action = words >> np.uint64(32)
    masked = action < round(replace.mask * _DRAWS)
    randomised = np.flatnonzero(~masked & (action < round((replace.mask + replace.random) * _DRAWS)))
    ids = target_ids.copy()
    ids[masked] = vocabulary.mask
    ids[randomised] = vocabulary.ordinary[
        scale(words[randomised].astype(np.uint32), len(vocabulary.ordinary))
    ]
    return ids


def _purpose(key: Key, purpose: str) -> Key:
    return stream_key(key.hex(), purpose)
