"""Every scheme's published numbers, each over a million rows (by default 50,000), within sampling error (five standard
deviations)."""

from collections.abc import Iterator

import numpy as np
import pytest

from data_service.rng import stream_key
from data_service.samples.make import make_rows
from data_service.samples.masking import MaskingTables, MlmMasking
from data_service.samples.packing import pack_block
from data_service.samples.samples import Samples
from data_service.types import Block
from tests.support.data.corpora import NEVER_MASKED, SPECIAL, VOCABULARY, spec_of, targets_per_row
from tests.support.data.row_settings import NOWHERE

ROWS = 50_000
LEAST, MOST = 20, 40  # tokens of a row
TEXT_IDS = 250  # the text has ids below this one
WORD_STARTS = np.arange(VOCABULARY) % 4 != 0  # three pieces in four start a word

# Frequencies (Zipf's) of ids that the text has not, so that a random token is never the one that stood there.
UNIGRAM = np.zeros(VOCABULARY, dtype=np.int64)
UNIGRAM[TEXT_IDS:] = 1_000_000 // np.arange(1, VOCABULARY - TEXT_IDS + 1)


@pytest.fixture(params=[1, pytest.param(20, marks=[pytest.mark.long, pytest.mark.heavy])])
def turns(request: pytest.FixtureRequest) -> int:
    """How often the same text is masked, each time with another key."""
    count: int = request.param
    return count


def masked_rows(turns: int, **masking: object) -> Iterator[tuple[np.ndarray, Samples]]:
    """Turn by turn: text tokens of each row, and the rows."""
    rng = np.random.default_rng(0)
    sentences = np.append(0, np.cumsum(rng.integers(LEAST, MOST + 1, ROWS)))
    text = rng.integers(len(NEVER_MASKED), TEXT_IDS, sentences[-1]).astype(np.uint16)
    block = Block(text, sentences, np.arange(ROWS + 1))
    settings = MlmMasking.model_validate(masking)
    spec = spec_of(NOWHERE, length=MOST + 2, masking=settings, input={"packing": "doc_sentences"})
    rows = pack_block(block, "doc_sentences", spec.length)
    words = None if settings.unit == "token" else WORD_STARTS
    unigram = UNIGRAM if settings.replace.random_from == "unigram" else None
    for turn in range(turns):
        key = stream_key("million", turn)
        yield np.diff(rows.edges), make_rows(block, rows, 0, ROWS, spec, key, MaskingTables(words, unigram))


def assert_share(found: int, total: int, share: float) -> None:
    assert abs(found - total * share) < 5 * np.sqrt(total * share * (1 - share))


@pytest.mark.parametrize("unit", ["token", "whole_word", "ngram", "span"])
def test_fifteen_percent_are_masked(turns: int, unit: str) -> None:
    """Of all maskable tokens; short only where no word is left that fits, less than one row in a thousand."""
    found = wanted = 0.0
    for lengths, samples in masked_rows(turns, unit=unit):
        found += len(samples.target_ids)
        wanted += 0.15 * lengths.sum()
    rounding = 5 * np.sqrt(ROWS * turns / 4)  # a row's count is one of the two integers beside its mean
    assert -rounding - ROWS * turns / 1000 < found - wanted < rounding


def test_eighty_ten_ten_span_by_span_and_random_tokens_by_frequency(turns: int) -> None:
    """SpanBERT: what happens is decided once a merged span, and its random tokens follow the corpus."""
    spans = masked = kept = 0
    random_ids = np.zeros(VOCABULARY, dtype=np.int64)
    for _, samples in masked_rows(turns, unit="span", count="ceil", replace={"random_from": "unigram"}):
        now = samples.tokens[samples.target_positions]
        starts = np.flatnonzero(np.diff(samples.target_positions, prepend=-2) != 1)
        sizes = np.diff(np.append(starts, len(now)))
        is_mask = np.add.reduceat(now == SPECIAL.mask, starts, dtype=np.int64)
        is_kept = np.add.reduceat(now == samples.target_ids, starts, dtype=np.int64)
        assert np.isin(is_mask / sizes, [0, 1]).all()
        assert np.isin(is_kept / sizes, [0, 1]).all()
        spans += len(sizes)
        masked += (is_mask > 0).sum()
        kept += (is_kept > 0).sum()
        random_ids += np.bincount(now[(now != SPECIAL.mask) & (now != samples.target_ids)], minlength=VOCABULARY)
    assert_share(masked, spans, 0.8)
    assert_share(kept, spans, 0.1)
    assert_share(spans - masked - kept, spans, 0.1)
    assert not random_ids[UNIGRAM == 0].any()
    expected = (UNIGRAM / UNIGRAM.sum() * random_ids.sum())[UNIGRAM > 0]
    statistic = ((random_ids[UNIGRAM > 0] - expected) ** 2 / expected).sum()
    assert statistic < len(expected) + 5 * np.sqrt(2 * len(expected))


def test_spanbert_masks_the_ceiling_of_fifteen_percent(turns: int) -> None:
    """Never more; less where no word is left that fits, in less than one row in a thousand."""
    short = 0
    for lengths, samples in masked_rows(turns, unit="span", count="ceil"):
        lacking = np.ceil(0.15 * lengths) - targets_per_row(samples)
        assert (lacking >= 0).all()
        short += (lacking > 0).sum()
    assert short < ROWS * turns / 1000


def test_electra_draws_with_replacement(turns: int) -> None:
    """n = max(1, round(0.15 m)) draws of m positions leave m (1 - (1 - 1 / m)^n) distinct ones on average."""
    total = variance = 0.0
    masked = targets = 0
    replace = {"mask": 0.85, "random": 0, "keep": 0.15}
    for lengths, samples in masked_rows(turns, count="drawn", replace=replace):
        drawn = np.maximum(np.rint(0.15 * lengths), 1)
        distinct = targets_per_row(samples)
        assert (distinct <= drawn).all()
        assert (distinct >= 1).all()
        error = distinct - lengths * (1 - (1 - 1 / lengths) ** drawn)
        total, variance = total + error.sum(), variance + (error**2).sum()
        targets += len(samples.target_ids)
        masked += (samples.tokens[samples.target_positions] == SPECIAL.mask).sum()
    assert variance > 0
    assert abs(total) < 5 * np.sqrt(variance)
    assert_share(masked, targets, 0.85)
