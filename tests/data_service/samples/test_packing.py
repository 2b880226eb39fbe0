"""Packing: every token once, whole sentences, documents kept apart."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_service.samples.packing import Packing, count_contiguous_rows, pack_block
from data_service.types import Block
from tests.support.data.corpora import random_block

PACKINGS: list[Packing] = ["full_sentences", "doc_sentences", "contiguous"]

blocks = st.builds(
    random_block,
    seed=st.integers(0, 10_000),
    tokens=st.integers(1, 600),
    sentence=st.floats(1, 60),
    document=st.floats(1, 20),
)


def literal_rows(block: Block, packing: Packing, length: int) -> list[list[tuple[int, int]]]:
    """Rows as lists of (first, last) token ranges of sentences or their pieces: the rule, sentence by sentence."""
    room = length - 2
    rows: list[list[tuple[int, int]]] = []
    used = 0
    for first, last in zip(block.documents[:-1], block.documents[1:], strict=True):
        new_document = True
        for sentence in range(first, last):
            start, stop = int(block.sentences[sentence]), int(block.sentences[sentence + 1])
            for begin in range(start, stop, room):
                piece = (begin, min(begin + room, stop))
                crossing = bool(rows) and new_document
                need = piece[1] - piece[0] + crossing
                if not rows or used + need > room or (crossing and packing == "doc_sentences"):
                    rows.append([])
                    used, need = 0, piece[1] - piece[0]
                rows[-1].append(piece)
                used += need
                new_document = False
    return rows


@given(blocks, st.sampled_from(["full_sentences", "doc_sentences"]), st.integers(8, 70))
def test_rows_follow_the_rule(block: Block, packing: Packing, length: int) -> None:
    literal = literal_rows(block, packing, length)
    assert pack_block(block, packing, length).edges.tolist() == [row[0][0] for row in literal] + [len(block.tokens)]


@given(blocks, st.sampled_from(PACKINGS), st.integers(8, 70))
def test_rows_share_and_lose_nothing_and_fit(block: Block, packing: Packing, length: int) -> None:
    rows = pack_block(block, packing, length)
    assert rows.edges[0] == 0
    assert rows.edges[-1] == len(block.tokens)
    assert (np.diff(rows.edges) > 0).all()
    assert rows.row_lengths.max() <= length


@given(blocks, st.sampled_from(PACKINGS), st.integers(8, 70))
def test_a_separator_stands_before_each_document_that_begins_inside_a_row(
    block: Block, packing: Packing, length: int
) -> None:
    rows = pack_block(block, packing, length)
    starts = set(block.sentences[block.documents].tolist())
    assert set(rows.separators.tolist()) == starts - set(rows.edges.tolist())
    if packing == "doc_sentences":
        assert not len(rows.separators)


@given(blocks, st.integers(8, 70))
def test_contiguous_rows_are_counted_from_the_manifest_and_full(block: Block, length: int) -> None:
    rows = pack_block(block, "contiguous", length)
    counted = count_contiguous_rows(np.array([len(block.tokens)]), np.array([len(block.documents) - 1]), length)
    assert len(rows) == counted[0]
    assert (rows.row_lengths[:-1] >= length - 2).all()  # a separator left out at either end
