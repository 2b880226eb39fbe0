"""Lanes: what a row holds, and that rows go on. Blocks here have no token twice, so every token tells its place."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.errors import PlanError
from data_service.rng import stream_key
from data_service.samples.lane_rows import DirectedBlockText, LaneRowTokens, lane_text_ranges
from data_service.samples.lanes import (
    SPECIAL_TOKENS_PER_ROW,
    LaneRows,
    Lanes,
    check_lane_settings,
    count_lane_rows,
    lane_rows,
)
from data_service.samples.permutation_lm import PermutedPrediction
from data_service.tokenizers.specials import SpecialIds
from data_service.types import Block

SPECIAL = SpecialIds(cls=0, sep=2, pad=1, mask=4, unk=3, eod=6)
NEVER = (0, 1, 2, 3, 4, 5, 6)
FIRST = 7
KEY = stream_key("test")

block_shapes = st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=5), min_size=1, max_size=8)


def block_of(documents: list[list[int]]) -> Block:
    """Documents of sentences of these lengths; no token twice."""
    sentences = np.cumsum([0, *(length for document in documents for length in document)])
    text = FIRST + np.arange(sentences[-1], dtype=np.uint32)
    return Block(text, sentences, np.cumsum([0, *map(len, documents)]))


def text_of(block: Block) -> list[int]:
    """With ends of documents, literally."""
    text: list[int] = []
    for first, last in zip(block.documents[:-1], block.documents[1:], strict=True):
        text += block.tokens[block.sentences[first] : block.sentences[last]].tolist()
        text.append(SPECIAL.eod or 0)
    return text


def lanes_of(reuse: int, *, random: float = 0.5, both: bool = True) -> Lanes:
    return Lanes(packing="lanes", reuse=reuse, random=random, both_directions=both)


def laid_out(block: Block, lanes: Lanes, length: int) -> tuple[LaneRows, LaneRowTokens]:
    rows = lane_rows(block, lanes, length)
    reading = DirectedBlockText.from_block(block, SPECIAL, NEVER, None, backward=rows.directions == 2)
    return rows, reading.lay_out(rows, 0, len(rows), SPECIAL, KEY)


def segments_of(text: LaneRowTokens, row: int, reuse: int) -> tuple[list[int], list[int], list[int]]:
    """The reused part, A and B of a row; its `<sep>` and `<cls>` are where they belong."""
    tokens, second = text.tokens[row].tolist(), int(text.segment_starts[row])
    assert [tokens[second - 1], *tokens[-2:]] == [SPECIAL.sep, SPECIAL.sep, SPECIAL.cls]
    return tokens[:reuse], tokens[reuse : second - 1], tokens[second:-2]


@given(block_shapes, st.integers(1, 20), st.integers(2, 20), st.booleans())
def test_a_row_with_its_own_second_segment_is_its_window(
    documents: list[list[int]], reuse: int, room: int, both: bool
) -> None:
    block, length = block_of(documents), reuse + room + SPECIAL_TOKENS_PER_ROW
    rows, text = laid_out(block, lanes_of(reuse, random=0, both=both), length)
    whole = text_of(block)
    starts = [start for start in range(0, len(whole), reuse) if start + reuse + room <= len(whole)]
    windows = [whole[start : start + reuse + room] for start in starts]
    expected = [w for window in windows for w in ([window, window[::-1]] if both else [window])]
    assert [list(chain(*segments_of(text, row, reuse))) for row in range(len(rows))] == expected
    assert (text.backward is None) == (not both)
    of_row, first, stop = lane_text_ranges(block, rows, SPECIAL, KEY)
    assert of_row.tolist() == list(range(len(rows)))
    for row in range(len(rows)):
        assert not both or text.backward is None or text.backward[row] == row % 2
        mine = block.tokens[first[row] : stop[row]].tolist()
        assert mine == [token for token in windows[row // rows.directions] if token != SPECIAL.eod]


@given(block_shapes, st.integers(1, 20), st.integers(2, 20))
def test_the_first_segment_ends_with_a_sentence_if_one_ends_in_the_window(
    documents: list[list[int]], reuse: int, room: int
) -> None:
    block = block_of(documents)
    rows, text = laid_out(block, lanes_of(reuse), reuse + room + SPECIAL_TOKENS_PER_ROW)
    whole = text_of(block)
    firsts = set(block.tokens[block.sentences[:-1]].tolist())
    for row in range(len(rows)):
        start = row // 2 * reuse
        window = whole[start : start + reuse + room][:: -1 if row % 2 else 1]
        reused, a, b = segments_of(text, row, reuse)
        assert reused == window[:reuse]
        assert a == window[reuse : reuse + len(a)]
        assert len(b) == room - len(a) > 0
        if row % 2:  # read backward, a segment ends with the first token of a sentence
            sentence_ends = [n for n in range(1, room) if window[reuse + n - 1] in firsts]
        else:
            sentence_ends = [n for n in range(1, room) if window[reuse + n] in firsts]
        assert not sentence_ends or len(a) in sentence_ends


@given(block_shapes, st.integers(1, 20), st.integers(2, 20))
def test_a_random_second_segment_is_text_from_a_sentence_on(documents: list[list[int]], reuse: int, room: int) -> None:
    block = block_of(documents)
    rows, text = laid_out(block, lanes_of(reuse, random=1), reuse + room + SPECIAL_TOKENS_PER_ROW)
    whole = text_of(block)
    document = np.repeat(np.arange(len(documents)), np.diff(block.documents))
    forward = (block.sentences[:-1] + document).tolist()  # where sentences begin in `whole`
    backward = [len(whole) - start for start in [*forward[1:], len(whole)]]
    for row in range(len(rows)):
        _, _, b = segments_of(text, row, reuse)
        reading, starts = (whole[::-1], backward) if row % 2 else (whole, forward)
        assert any(reading[start : start + len(b)] == b for start in starts)


@given(block_shapes, st.integers(1, 20), st.integers(2, 40), st.booleans())
def test_rows_are_counted_from_the_manifest(documents: list[list[int]], reuse: int, room: int, both: bool) -> None:
    block, lanes, length = (
        block_of(documents),
        lanes_of(reuse, both=both),
        reuse + room + SPECIAL_TOKENS_PER_ROW,
    )
    counted = count_lane_rows(np.array([len(block.tokens)]), np.array([len(documents)]), lanes, length)
    rows = lane_rows(block, lanes, length)
    assert counted.tolist() == [len(rows)]
    assert rows.row_lengths.tolist() == [length] * len(rows)
    whole = len(text_of(block))
    fitting = sum(start + reuse + room <= whole for start in range(0, whole, reuse))
    assert len(rows) == fitting * (2 if both else 1)


def test_the_share_of_random_second_segments() -> None:
    """Over 100,000 rows. A random one continues A only by chance, one time in thousands."""
    rng = np.random.default_rng(4)
    block = block_of([rng.integers(4, 20, 30_000).tolist()])
    for random in (0.5, 0.2):
        rows, text = laid_out(block, lanes_of(6, random=random), 6 + 21 + SPECIAL_TOKENS_PER_ROW)
        every = np.arange(len(rows))
        assert text.backward is not None
        step = np.where(text.backward, -1, 1)
        last_of_a = text.tokens[every, text.segment_starts - 2].astype(np.int64)
        goes_on = text.tokens[every, text.segment_starts] == last_of_a + step
        share = 1 - goes_on.mean()
        assert len(rows) > 100_000
        assert abs(share - random) < 4 * np.sqrt(random * (1 - random) / len(rows)) + 1e-3


def test_words_are_the_same_read_either_way() -> None:
    """In each row, what one word's start and the next enclose is a word of the text, or what an edge left of it."""
    rng = np.random.default_rng(5)
    block = block_of([rng.integers(1, 12, rng.integers(1, 8)).tolist() for _ in range(40)])
    starts_word = rng.random(FIRST + len(block.tokens)) < 0.5
    starts_word[list(NEVER)] = True
    begins = starts_word[block.tokens]
    begins[block.sentences[:-1]] = True
    word = dict(zip(block.tokens.tolist(), np.cumsum(begins).tolist(), strict=True))
    rows = lane_rows(block, lanes_of(10), 33)
    reading = DirectedBlockText.from_block(block, SPECIAL, NEVER, starts_word, backward=True)
    text = reading.lay_out(rows, 0, len(rows), SPECIAL, KEY)
    for row in range(len(rows)):
        tokens = text.tokens[row].tolist()
        edges = {0, 10, int(text.segment_starts[row])}
        for place in range(len(tokens)):
            fixed = tokens[place] in NEVER
            assert text.fixed[row, place] == fixed
            apart = place in edges or fixed or word.get(tokens[place]) != word.get(tokens[place - 1])
            assert text.begins[row, place] == apart


def test_without_an_end_of_document_token_the_separator_ends_documents() -> None:
    block = block_of([[10], [10]])
    reading = DirectedBlockText.from_block(block, SpecialIds(0, 2, 1, 4, 3), (0, 1, 2, 3, 4), None, backward=False)
    assert reading.tokens.tolist() == [*range(7, 17), 2, *range(17, 27), 2]
    assert np.flatnonzero(reading.flags & 2).tolist() == [10, 21]


def test_what_does_not_fit_is_refused() -> None:
    lanes, permuted = lanes_of(16), PermutedPrediction(predict=8)
    check_lane_settings(lanes, permuted, 24, 4)
    for length, problem in (
        (20, "cannot reuse 16"),
        (70_000, "cannot reuse 16"),
        (22, "8 targets do not fit"),
    ):
        with pytest.raises(PlanError, match=problem):
            check_lane_settings(lanes, permuted, length, 4)
    with pytest.raises(PlanError, match=r"\b34 targets\b"):
        check_lane_settings(lanes, PermutedPrediction(predict=34), 64, 4)
    with pytest.raises(PlanError, match=r"\b5 lanes\b"):
        check_lane_settings(lanes, permuted, 24, 5)
    check_lane_settings(lanes_of(16, both=False), permuted, 24, 5)
