"""Masking: exactly so many targets, uniform, never a special token, and keyed by nothing but the row."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from data_service.rng import Key, stream_key
from data_service.samples.make import make_rows
from data_service.samples.masking import MaskingTables, MlmMasking
from data_service.samples.packing import PackedInput, RowCuts, pack_block
from data_service.samples.samples import Samples
from data_service.samples.spec import SourceSpec, StreamSpec
from data_service.types import Block
from tests.support.data.corpora import NEVER_MASKED, SPECIAL, VOCABULARY, random_block, spec_of, targets_per_row

SOURCE = SourceSpec(name="text", uri="nowhere", manifest_fingerprint="f" * 64)
WORD_STARTS = np.arange(VOCABULARY) % 3 != 0  # about two thirds of the pieces start a word


def spec_with(masking: MlmMasking, length: int = 64, packing: str = "full_sentences") -> StreamSpec:
    return spec_of(SOURCE, length=length, masking=masking, input={"packing": packing})


def make(block: Block, spec: StreamSpec, key: Key | None = None) -> tuple[RowCuts, Samples]:
    assert isinstance(spec.input, PackedInput)
    rows = pack_block(block, spec.input.packing, spec.length)
    words = None if spec.masking.unit == "token" else WORD_STARTS
    return rows, make_rows(block, rows, 0, len(rows), spec, key or stream_key("test"), MaskingTables(words))


def originals(samples: Samples) -> np.ndarray:
    tokens = samples.tokens.copy()
    tokens[samples.target_positions] = samples.target_ids
    return tokens


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


@given(some_blocks(), maskings, st.sampled_from(["full_sentences", "doc_sentences"]))
def test_the_text_is_all_there_and_nothing_special_is_masked(block: Block, masking: MlmMasking, packing: str) -> None:
    _, samples = make(block, spec_with(masking, packing=packing))
    restored = originals(samples)
    special = np.isin(restored, NEVER_MASKED)
    np.testing.assert_array_equal(restored[~special], block.tokens[block.tokens != SPECIAL.unk])
    assert (restored == SPECIAL.unk).sum() == (block.tokens == SPECIAL.unk).sum()
    assert not special[samples.target_positions].any()
    assert (np.diff(samples.target_positions) > 0).all()
    assert (samples.tokens[samples.offsets[:-1]] == SPECIAL.cls).all()
    assert (samples.tokens[samples.offsets[1:] - 1] == SPECIAL.sep).all()


@given(some_blocks(), maskings)
def test_every_row_has_its_exact_number_of_targets(block: Block, masking: MlmMasking) -> None:
    rows, samples = make(block, spec_with(masking))
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
    rows, samples = make(block, spec_with(MlmMasking.model_validate({"unit": unit, "rate": rate})))
    starts = WORD_STARTS[block.tokens]
    starts[block.sentences[:-1]] = True
    starts[rows.edges[:-1]] = True
    word = np.cumsum(starts)  # of every text token
    in_text = np.cumsum(~np.isin(originals(samples), NEVER_MASKED)) - 1
    hit = np.zeros(len(block.tokens), dtype=bool)
    hit[in_text[samples.target_positions]] = True
    for number in np.unique(word[hit]):
        assert hit[word == number].all()


def test_targets_are_uniform_without_replacement() -> None:
    """Over many draws of one row every position, and every pair of positions, is equally often a target."""
    text, draws = 20, 30_000
    block = Block(
        np.full(text * draws, 9, dtype=np.uint16),
        np.arange(0, text * draws + 1, text),
        np.arange(draws + 1),
    )
    spec = spec_with(MlmMasking(rate=0.25, count="bert"), length=text + 2, packing="doc_sentences")
    _, samples = make(block, spec)
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
    block = Block(
        np.full(text * draws, 9, dtype=np.uint16),
        np.arange(0, text * draws + 1, text),
        np.arange(draws + 1),
    )
    spec = spec_with(MlmMasking(rate=0.8, count="bert"), length=text + 2, packing="doc_sentences")
    _, samples = make(block, spec)
    assert (targets_per_row(samples) == 24).all()
    singles = np.bincount(samples.target_positions % (text + 2), minlength=text + 2)[1:-1]
    expected, variance = draws * 0.8, draws * 0.8 * 0.2
    assert ((singles - expected) ** 2).sum() / variance * 29 / 30 < 70


@pytest.mark.parametrize("unit", ["token", "ngram"])
def test_replacements_are_eighty_ten_ten_and_random_ids_uniform(unit: str) -> None:
    block = random_block(5, 1_000_000, sentence=40)
    _, samples = make(block, spec_with(MlmMasking.model_validate({"unit": unit}), length=512))
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
    block, spec = random_block(4, 20_000), spec_with(MlmMasking())
    first, second = (make(block, spec, stream_key(key))[1].target_positions for key in (0, 1))
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
