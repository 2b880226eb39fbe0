"""N-grams and spans: the same outcomes, as often, as a literal statement of each rule gives."""

from collections.abc import Callable

import numpy as np
import pytest
from corpus import SPECIAL, random_block, spec_of
from hypothesis import given
from hypothesis import strategies as st

from data_service.rng import stream_key
from data_service.samples.make import make_rows
from data_service.samples.masking import MlmMasking
from data_service.samples.packing import pack
from data_service.shards.block import Block
from data_service.spec import SourceSpec, StreamSpec

SOURCE = SourceSpec(name="text", uri="nowhere", manifest_fingerprint="f" * 64)
WORD_STARTS = np.arange(500) % 3 != 0
START, GOES_ON = 7, 6  # ids of a piece that starts a word and one that does not

# A row: two documents with a separator between them, and an unknown piece. Words as [first, last + 1) of the text.
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

Rule = Callable[[np.random.Generator], set[int]]


def ngrams_by_the_book(rng: np.random.Generator) -> set[int]:
    """google-research/albert's rule, told slowly; a start that is given up may be drawn again."""
    chosen: set[int] = set()
    while True:
        left = BUDGET - sum(size_of(word) for word in chosen)
        if not any(size_of(word) <= left for word in range(len(WORDS)) if word not in chosen):
            return chosen
        start = int(rng.integers(len(WORDS)))
        n = int(rng.choice([1, 2, 3], p=[6 / 11, 3 / 11, 2 / 11]))
        words = list(range(start, min(start + n, run_end(start))))
        while words and sum(map(size_of, words)) > left:
            words.pop()
        if not chosen.intersection(words):
            chosen.update(words)


def spans_by_the_book(rng: np.random.Generator) -> set[int]:
    """Joshi et al. 2020, section 3.1, told slowly, of whole words only."""
    chosen: set[int] = set()
    shares = np.array([0.2 * 0.8**k for k in range(10)])
    while True:
        left = BUDGET - sum(size_of(word) for word in chosen)
        if not any(size_of(word) <= left for word in range(len(WORDS)) if word not in chosen):
            return chosen
        start = int(rng.integers(len(WORDS)))
        n = int(rng.choice(np.arange(1, 11), p=shares / shares.sum()))
        if start in chosen:
            continue
        for word in range(start, min(start + n, run_end(start))):
            if word not in chosen:
                if size_of(word) > left:
                    break
                left -= size_of(word)
                chosen.add(word)


def size_of(word: int) -> int:
    return WORDS[word][1] - WORDS[word][0]


def run_end(word: int) -> int:
    return min(end for end in RUN_ENDS if end > word)


@pytest.mark.parametrize(("unit", "rule"), [("ngram", ngrams_by_the_book), ("span", spans_by_the_book)])
def test_sets_of_targets_are_as_frequent_as_by_the_literal_rule(unit: str, rule: Rule) -> None:
    rows, literal_rows = 100_000, 20_000
    found = patterns_made(unit, rows)
    rng = np.random.default_rng(1)
    literal = np.zeros(1 << TEXT, dtype=np.int64)
    for _ in range(literal_rows):
        literal[sum(1 << at for word in rule(rng) for at in range(*WORDS[word]))] += 1
    common = literal >= 5
    assert common.sum() > 30
    assert found[~common & (literal == 0)].sum() < 0.01 * rows  # what the rule never does is not done either
    ratio = np.sqrt(rows / literal_rows)  # two samples: chi-square with a degree of freedom a pattern
    difference = found[common] / ratio - literal[common] * ratio
    statistic = (difference**2 / (found + literal)[common]).sum()
    freedom = common.sum()
    assert statistic < freedom + 5 * np.sqrt(2 * freedom)


def patterns_made(unit: str, rows: int) -> np.ndarray:
    """How often each set of text offsets, as a bit mask, is what is masked in the row."""
    text = np.tile(np.concatenate(DOCUMENTS).astype(np.uint16), rows)
    sentences = np.arange(0, TEXT * rows + 1, TEXT // 2)
    block = Block(text, sentences, np.arange(len(sentences)))
    masking = MlmMasking.model_validate({"unit": unit, "rate": RATE, "count": "ceil"})
    spec = spec_with(masking, length=TEXT + 3)
    cuts = pack(block, "full_sentences", spec.length)
    assert len(cuts) == rows
    samples = make_rows(block, cuts, 0, rows, spec, stream_key("book"), WORD_STARTS)
    row, place = np.divmod(samples.target_positions, TEXT + 3)
    offset = place - 1 - (place > TEXT // 2 + 1)  # less `<s>`, and the separator between the documents
    masks = np.bincount(row, weights=2.0**offset, minlength=rows).astype(np.int64)
    return np.bincount(masks, minlength=1 << TEXT)


@given(
    st.builds(random_block, seed=st.integers(0, 1000), tokens=st.integers(1, 600)),
    st.sampled_from(["ngram", "span"]),
    st.floats(0.05, 0.8),
    st.none() | st.integers(1, 6),
)
def test_a_row_lacks_targets_only_where_no_word_fits(
    block: Block, unit: str, rate: float, longest: int | None
) -> None:
    masking = MlmMasking.model_validate({"unit": unit, "rate": rate, "count": "ceil", "longest": longest})
    spec = spec_with(masking, packing="doc_sentences")
    rows = pack(block, "doc_sentences", spec.length)
    samples = make_rows(block, rows, 0, len(rows), spec, stream_key("fits"), WORD_STARTS)
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


def spec_with(masking: MlmMasking, length: int = 32, packing: str = "full_sentences") -> StreamSpec:
    return spec_of(SOURCE, length=length, masking=masking, input={"packing": packing})
