"""Masking: exactly so many targets, uniform, never a special token, and keyed by nothing but the row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from data_service.rng import stream_key
from data_service.samples.masking import MlmMasking
from data_service.types import Block
from tests.support.data.corpora import NEVER_MASKED, SPECIAL, VOCABULARY, originals, random_block, targets_per_row
from tests.support.data.row_settings import WORD_STARTS, packed_rows

maskings = st.builds(
    MlmMasking,
    rate=st.floats(0.01, 0.8),
    unit=st.sampled_from(["token", "whole_word", "ngram", "span"]),
    count=st.sampled_from(["stochastic", "bert", "ceil"]),
    max_predictions=st.none() | st.integers(1, 20),
    count_special=st.booleans(),
) | st.builds(MlmMasking, rate=st.floats(0.01, 0.8), count=st.just("drawn"))


@st.composite
def some_blocks(draw: st.DrawFn) -> Block:
    """Some of them with unknown pieces, which are never masked; a few of nothing else."""
    block = random_block(draw(st.integers(0, 1000)), draw(st.integers(1, 900)))
    block.tokens[:: draw(st.sampled_from([10**6, 7, 3, 1]))] = SPECIAL.unk
    return block


@given(some_blocks(), maskings)
def test_every_row_has_its_exact_number_of_targets(block: Block, masking: MlmMasking) -> None:
    rows, samples = packed_rows(block, masking)
    found = targets_per_row(samples)
    maskable = np.add.reduceat(block.tokens != SPECIAL.unk, rows.edges[:-1])
    wanted = masking.rate * (np.diff(samples.offsets) if masking.count_special else maskable)
    if masking.count in ("bert", "drawn"):
        least = most = np.maximum(np.rint(wanted), 1)
    elif masking.count == "ceil":
        least = most = np.ceil(wanted)
    else:
        least, most = np.floor(wanted), np.floor(wanted) + 1
    cap = masking.max_predictions or 10**6
    assert (found <= np.minimum(np.minimum(most, cap), maskable)).all()
    if masking.unit == "token" and masking.count != "drawn":
        assert (found >= np.minimum(np.minimum(least, cap), maskable)).all()


@given(
    st.builds(random_block, seed=st.integers(0, 1000), tokens=st.integers(1, 900)),
    st.floats(0.05, 0.5),
    st.sampled_from(["whole_word", "ngram", "span"]),
)
def test_words_are_masked_whole(block: Block, rate: float, unit: str) -> None:
    rows, samples = packed_rows(block, MlmMasking.model_validate({"unit": unit, "rate": rate}))
    starts = WORD_STARTS[block.tokens]
    starts[block.sentences[:-1]] = True
    starts[rows.edges[:-1]] = True
    word = np.cumsum(starts)  # of every text token
    in_text = np.cumsum(~np.isin(originals(samples), NEVER_MASKED)) - 1
    hit = np.zeros(len(block.tokens), dtype=bool)
    hit[in_text[samples.target_positions]] = True
    for number in np.unique(word[hit]):
        assert hit[word == number].all()


def equal_rows(tokens: int, rows: int) -> Block:
    """So many documents of one sentence of so many tokens."""
    edges = np.arange(0, tokens * rows + 1, tokens)
    return Block(np.full(tokens * rows, 9, dtype=np.uint16), edges, np.arange(rows + 1))


@given(
    st.builds(
        MlmMasking,
        rate=st.floats(0.01, 0.8),
        count=st.sampled_from(["stochastic", "bert", "ceil", "drawn"]),
        max_predictions=st.none() | st.integers(1, 20),
        count_special=st.booleans(),
    ),
    st.integers(6, 40),
    st.data(),
)
def test_the_expected_number_of_targets_is_their_mean(masking: MlmMasking, text: int, data: st.DataObject) -> None:
    """Also in rows of which nothing, or almost nothing, can be masked."""
    rows, fixed = 2000, data.draw(st.integers(0, text))
    block = equal_rows(text, rows)
    block.tokens.reshape(rows, text)[:, :fixed] = SPECIAL.unk
    found = targets_per_row(packed_rows(block, masking, "doc_sentences", text + 2)[1])
    deviation = np.sqrt(max(found.var(), 1 / rows) / rows)
    assert abs(found.mean() - masking.expected_target_count(text + 2, text - fixed)) < 6 * deviation


def test_targets_are_uniform_without_replacement() -> None:
    """Over many draws of one row every position, and every pair of positions, is equally often a target."""
    text, draws = 20, 30_000
    _, samples = packed_rows(equal_rows(text, draws), MlmMasking(rate=0.25, count="bert"), "doc_sentences", text + 2)
    assert (targets_per_row(samples) == 5).all()
    hit = np.zeros((draws, text + 2), dtype=bool)
    hit[np.divmod(samples.target_positions, text + 2)] = True
    hit = hit[:, 1:-1].astype(np.int64)
    singles = hit.sum(0)
    expected, variance = draws * 5 / 20, draws * 5 / 20 * 15 / 20
    # Counts of a simple random sample: their covariance makes the statistic below chi-square with 19 degrees.
    assert ((singles - expected) ** 2).sum() / variance * 19 / 20 < 55  # p < 3e-5
    pairs = (hit.T @ hit)[np.triu_indices(text, 1)]
    together = draws * 5 * 4 / (20 * 19)
    z = (pairs - together) / np.sqrt(together * (1 - together / draws))
    assert np.abs(z).max() < 5
    assert abs((z**2).mean() - 1) < 0.4


def test_positions_are_uniform_in_long_rows_with_hardly_enough_draws() -> None:
    """At a high rate rows often finish outside their slots; they must not favour any position for it."""
    text, draws = 30, 20_000
    _, samples = packed_rows(equal_rows(text, draws), MlmMasking(rate=0.8, count="bert"), "doc_sentences", text + 2)
    assert (targets_per_row(samples) == 24).all()
    singles = np.bincount(samples.target_positions % (text + 2), minlength=text + 2)[1:-1]
    expected, variance = draws * 0.8, draws * 0.8 * 0.2
    assert ((singles - expected) ** 2).sum() / variance * 29 / 30 < 70


@pytest.mark.parametrize("unit", ["token", "ngram"])
def test_replacements_are_eighty_ten_ten_and_random_ids_uniform(unit: str) -> None:
    block = random_block(5, 1_000_000, sentence=40)
    _, samples = packed_rows(block, MlmMasking.model_validate({"unit": unit}), length=512)
    now = samples.tokens[samples.target_positions]
    total = len(now)
    masked, kept = now == SPECIAL.mask, now == samples.target_ids
    randomised = ~masked & ~kept
    ordinary = VOCABULARY - len(NEVER_MASKED)
    for found, share in (
        (masked, 0.8),
        (kept, 0.1 + 0.1 / ordinary),  # a random token may be the same again
        (randomised, 0.1 * (1 - 1 / ordinary)),
    ):
        assert abs(found.sum() - total * share) < 5 * np.sqrt(total * share * (1 - share))
    counts = np.bincount(now[randomised], minlength=VOCABULARY)
    assert not counts[list(NEVER_MASKED)].any()
    counts = np.delete(counts, NEVER_MASKED)
    expected = counts.mean()
    assert ((counts - expected) ** 2 / expected).sum() < ordinary + 5 * np.sqrt(2 * ordinary)


def test_other_keys_give_other_masks() -> None:
    block = random_block(4, 20_000)
    first, second = (packed_rows(block, MlmMasking(), key=stream_key(key))[1].target_positions for key in (0, 1))
    shared = len(np.intersect1d(first, second)) / len(first)
    assert abs(shared - 0.15) < 0.03


def test_copies_are_used_in_turn() -> None:
    assert [MlmMasking(copies=4).epoch_of_draws(epoch) for epoch in range(6)] == [0, 1, 2, 3, 0, 1]
    assert [MlmMasking().epoch_of_draws(epoch) for epoch in range(3)] == [0, 1, 2]


@pytest.mark.parametrize(
    "settings",
    [
        {"rate": 0},
        {"rate": 0.9},
        {"copies": 0},
        {"max_predictions": 0},
        {"replace": {"mask": 0.8, "random": 0.1, "keep": 0.2}},
        {"unit": "letter"},
        {"unit": "token", "longest": 3},
        {"unit": "whole_word", "longest": 3},
        {"unit": "span", "longest": 0},
        {"unit": "ngram", "span_p": 0.2},
        {"unit": "span", "span_p": 1},
        {"unit": "whole_word", "count": "drawn"},
        {"replace": {"mask": 0.85, "random": 0, "keep": 0.15, "random_from": "unigram"}},
        {"masking_rate": 0.15},
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        MlmMasking.model_validate(settings)
