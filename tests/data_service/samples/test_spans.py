"""N-grams and spans: lengths as published; the same outcomes, as often, as a literal statement of each rule gives."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.rng import draw_uint32, stream_key
from data_service.samples.masking import MlmMasking
from data_service.samples.spans import LengthDistribution, ngram_lengths, span_lengths
from data_service.types import Block
from tests.support.data.corpora import SPECIAL, random_block
from tests.support.data.row_settings import WORD_STARTS, packed_rows

DRAWS = 1_000_000


def assert_shares(lengths: LengthDistribution, shares: list[float]) -> np.ndarray:
    """Every length within five standard deviations of its share."""
    drawn = lengths.lengths_from_draws(draw_uint32(stream_key("lengths"), 0, DRAWS))
    counts = np.bincount(drawn, minlength=len(shares) + 1)
    assert counts[0] == 0
    assert len(counts) == len(shares) + 1
    for found, share in zip(counts[1:], shares, strict=True):
        assert abs(found - DRAWS * share) <= 5 * np.sqrt(DRAWS * share * (1 - share))
    return drawn


def test_an_ngram_of_n_words_has_probability_proportional_to_one_over_n() -> None:
    assert_shares(ngram_lengths(3), [6 / 11, 3 / 11, 2 / 11])
    assert_shares(ngram_lengths(5), [60 / 137, 30 / 137, 20 / 137, 15 / 137, 12 / 137])


def test_spans_are_geometric_cut_off_at_ten_and_renormalised() -> None:
    drawn = assert_shares(span_lengths(0.2, 10), [0.2 * 0.8**k / (1 - 0.8**10) for k in range(10)])
    assert round(float(drawn.mean()), 1) == 3.8  # Joshi et al. 2020, section 3.1


@pytest.mark.parametrize("lengths", [ngram_lengths(1), span_lengths(0.5, 1)])
def test_a_longest_of_one_word_is_always_one_word(lengths: LengthDistribution) -> None:
    assert_shares(lengths, [1.0])


def test_the_extreme_draws_are_the_shortest_and_the_longest() -> None:
    extremes = np.array([0, (1 << 32) - 1], dtype=np.uint32)
    for lengths in (ngram_lengths(3), span_lengths(0.2, 10)):
        assert lengths.lengths_from_draws(extremes).tolist() == [1, lengths.max_length]


START, GOES_ON = 7, 6  # ids of a piece that starts a word and one that does not

Words = list[tuple[int, int]]  # each [first, last + 1) of a row's text

# A row: two documents with a separator between them, and an unknown piece.
DOCUMENTS = (
    [START, START, GOES_ON, START, START, GOES_ON, GOES_ON],
    [START, GOES_ON, START, SPECIAL.unk, GOES_ON, START, START],
)
TEXT = 14
WORDS = [(0, 1), (1, 3), (3, 4), (4, 7), (7, 9), (9, 10), (11, 12), (12, 13), (13, 14)]
RUN_ENDS = [
    4,
    6,
    9,
]  # numbers of the words at which the first document ends, the unknown piece stands, the row ends
RATE = 0.45
BUDGET = 6  # ceil(0.45 * 13 maskable pieces)

Rule = Callable[[np.random.Generator, Words, list[int], int], set[int]]


def ngrams_by_the_book(rng: np.random.Generator, words: Words, run_ends: list[int], budget: int) -> set[int]:
    """google-research/albert's rule, told slowly; a start that is given up may be drawn again."""
    sizes = [last - first for first, last in words]
    chosen: set[int] = set()
    while True:
        left = budget - sum(sizes[word] for word in chosen)
        if not any(size <= left for word, size in enumerate(sizes) if word not in chosen):
            return chosen
        start = int(rng.integers(len(words)))
        n = 1 + int(np.searchsorted([6 / 11, 9 / 11], rng.random()))
        taken = list(range(start, min(start + n, run_end(start, run_ends))))
        while taken and sum(sizes[word] for word in taken) > left:
            taken.pop()
        if not chosen.intersection(taken):
            chosen.update(taken)


def spans_by_the_book(rng: np.random.Generator, words: Words, run_ends: list[int], budget: int) -> set[int]:
    """Joshi et al. 2020, section 3.1, told slowly, of whole words only."""
    sizes = [last - first for first, last in words]
    chosen: set[int] = set()
    while True:
        left = budget - sum(sizes[word] for word in chosen)
        if not any(size <= left for word, size in enumerate(sizes) if word not in chosen):
            return chosen
        start = int(rng.integers(len(words)))
        n = 11
        while n > 10:  # the geometric distribution, its tail drawn again
            n = int(rng.geometric(0.2))
        if start in chosen:
            continue
        for word in range(start, min(start + n, run_end(start, run_ends))):
            if word not in chosen:
                if sizes[word] > left:
                    break
                left -= sizes[word]
                chosen.add(word)


def run_end(word: int, run_ends: list[int]) -> int:
    return min(end for end in run_ends if end > word)


RULES = pytest.mark.parametrize(("unit", "rule"), [("ngram", ngrams_by_the_book), ("span", spans_by_the_book)])


@pytest.mark.parametrize(
    ("rate", "shares"),
    [
        (0.15, (0.4, 0.3, 0.2, 0.1)),
        (0.02, (0.51, 0.29, 0.15, 0.05)),
    ],  # MacBERT's, section 3.1; the recipe's comment
)
def test_macberts_ngrams_have_the_published_shares_unless_the_budget_is_small(
    rate: float, shares: tuple[float, ...]
) -> None:
    """Of rows of 512 with words of two pieces. Neighbours count as one, a few in a hundred."""
    text, rows = 510, 1500
    tokens = np.tile(np.array([START, GOES_ON], dtype=np.uint16), text // 2 * rows)
    block = Block(tokens, np.arange(0, len(tokens) + 1, text), np.arange(rows + 1))
    masking = MlmMasking(unit="ngram", ngram_weights=(0.4, 0.3, 0.2, 0.1), count="bert", rate=rate)
    targets = packed_rows(block, masking, "doc_sentences", text + 2)[1].target_positions
    begins = np.flatnonzero(np.diff(targets, prepend=-2) != 1)
    words = np.bincount(np.diff(begins, append=len(targets)) // 2, minlength=5)
    assert words[1:5] / words.sum() == pytest.approx(shares, abs=0.02)


def assert_alike(found: np.ndarray, literal: np.ndarray) -> None:
    """Two samples of one distribution, by chi-square with a degree of freedom for each of its common values."""
    common = literal >= 5
    # What the rule hardly ever does is not often done either.
    assert found[~common & (literal == 0)].sum() < 0.01 * found.sum()
    ratio = np.sqrt(found.sum() / literal.sum())
    difference = found[common] / ratio - literal[common] * ratio
    freedom = common.sum()
    assert (difference**2 / (found + literal)[common]).sum() < freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.long
@pytest.mark.heavy
@RULES
def test_sets_of_targets_are_as_frequent_as_by_the_literal_rule(unit: str, rule: Rule) -> None:
    rows, literal_rows = 100_000, 20_000
    rng = np.random.default_rng(1)
    literal = np.zeros(1 << TEXT, dtype=np.int64)
    for _ in range(literal_rows):
        chosen = rule(rng, WORDS, RUN_ENDS, BUDGET)
        literal[sum(1 << at for word in chosen for at in range(*WORDS[word]))] += 1
    assert (literal >= 5).sum() > 30
    assert_alike(patterns_made(unit, rows), literal)


def patterns_made(unit: str, rows: int) -> np.ndarray:
    """How often each set of text offsets, as a bit mask, is what is masked in the row."""
    text = np.tile(np.concatenate(DOCUMENTS).astype(np.uint16), rows)
    sentences = np.arange(0, TEXT * rows + 1, TEXT // 2)
    block = Block(text, sentences, np.arange(len(sentences)))
    masking = MlmMasking.model_validate({"unit": unit, "rate": RATE, "count": "ceil"})
    _, samples = packed_rows(block, masking, length=TEXT + 3)
    assert samples.rows == rows
    row, place = np.divmod(samples.target_positions, TEXT + 3)
    offset = place - 1 - (place > TEXT // 2 + 1)  # less `<s>`, and the separator between the documents
    masks = np.bincount(row, weights=2.0**offset, minlength=rows).astype(np.int64)
    return np.bincount(masks, minlength=1 << TEXT)


@given(
    st.builds(random_block, seed=st.integers(0, 1000), tokens=st.integers(1, 600)),
    st.sampled_from(["whole_word", "ngram", "span"]),
    st.floats(0.05, 0.8),
    st.none() | st.integers(1, 6),
)
def test_a_row_lacks_targets_only_where_no_word_fits(block: Block, unit: str, rate: float, longest: int | None) -> None:
    longest = None if unit == "whole_word" else longest
    masking = MlmMasking.model_validate({"unit": unit, "rate": rate, "count": "ceil", "longest": longest})
    rows, samples = packed_rows(block, masking, "doc_sentences", 32)
    shift = 1 + 2 * np.repeat(np.arange(len(rows)), np.diff(rows.edges))
    hit = np.isin(np.arange(len(block.tokens)) + shift, samples.target_positions)
    begins = WORD_STARTS[block.tokens]
    begins[block.sentences[:-1]] = begins[rows.edges[:-1]] = True
    for first, last in zip(rows.edges[:-1], rows.edges[1:], strict=True):
        left = int(np.ceil(rate * (last - first))) - int(hit[first:last].sum())
        starts = first + np.flatnonzero(begins[first:last])
        sizes = np.diff(np.append(starts, last))
        assert left >= 0
        assert left < sizes[~hit[starts]].min(initial=10**6)
