"""Rows of several texts: each cut to the length, laid out as its family has it, any row alone as among others."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from data_service.errors import CorpusError
from data_service.samples.make import cut_block, make_rows
from data_service.samples.samples import Samples
from data_service.samples.spec import StreamSpec
from data_service.types import Block
from tests.support.data.corpora import SPECIAL, block_of, block_of_pairs, random_block, spec_of
from tests.support.data.row_settings import KEY, NOWHERE

layouts = st.sampled_from(["cls_first", "cls_last"])


def texts_spec(packing: str, layout: str = "cls_first", length: int = 12, **settings: int) -> StreamSpec:
    return spec_of(
        NOWHERE,
        length=length,
        layout=layout,
        input={"packing": packing, **settings},
        masking={"kind": "none"},
    )


def made(block: Block, spec: StreamSpec) -> Samples:
    rows = cut_block(block, spec, KEY)
    return make_rows(block, rows, 0, len(rows), spec, KEY)


def texts_of(samples: Samples) -> list[list[list[int]]]:
    """The texts of each row, with their special tokens."""
    assert samples.text_starts is not None
    found = []
    for row, (first, last) in enumerate(itertools.pairwise(samples.offsets.tolist())):
        edges = [*(first + samples.text_starts[row]).tolist(), last]
        found.append([samples.tokens[start:stop].tolist() for start, stop in itertools.pairwise(edges)])
    return found


def laid(text: list[int], layout: str, length: int) -> list[int]:
    text = text[: length - 2]
    if layout == "cls_last":
        return [*text, SPECIAL.sep, SPECIAL.cls]
    return [SPECIAL.cls, *text, SPECIAL.sep]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 1000), st.integers(0, 3), st.integers(0, 3), layouts, st.integers(8, 30))
def test_an_example_is_its_first_texts_each_cut_and_laid_out(
    seed: int, negatives: int, more: int, layout: str, length: int
) -> None:
    block = block_of_pairs(seed, 9, 2 + negatives + more)
    spec = texts_spec("pairs", layout, length, negatives=negatives)
    expected = [
        [
            laid(block.tokens[block.sentences[number] : block.sentences[number + 1]].tolist(), layout, length)
            for number in range(first, first + 2 + negatives)
        ]
        for first in block.documents[:-1].tolist()
    ]
    samples = made(block, spec)
    assert texts_of(samples) == expected
    assert len(samples.target_positions) == len(samples.target_ids) == 0
    assert (samples.cls_last is None) == (layout == "cls_first")


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 1000), st.integers(1, 30), layouts)
def test_a_sentence_long_enough_is_a_row_that_holds_it_twice(seed: int, shortest: int, layout: str) -> None:
    block = random_block(seed, 400, sentence=9)
    spec = texts_spec("sentences", layout, shortest=shortest)
    sentences = [
        block.tokens[start:stop].tolist()
        for start, stop in itertools.pairwise(block.sentences.tolist())
        if stop - start >= shortest
    ]
    rows = cut_block(block, spec, KEY)
    assert len(rows) == len(sentences)
    if sentences:
        assert texts_of(made(block, spec)) == [[laid(text, layout, 12)] * 2 for text in sentences]


def test_documents_with_too_few_texts_are_no_examples() -> None:
    with pytest.raises(CorpusError, match=r"\b3 texts\b"):
        cut_block(block_of([[3, 4], [5, 6, 7]]), texts_spec("pairs", negatives=1), KEY)


@pytest.mark.parametrize(
    ("packing", "masking"),
    [("pairs", "mlm"), ("sentences", "mlm"), ("full_sentences", "none"), ("lanes", "none")],
)
def test_texts_go_with_no_masking_and_nothing_else_does(packing: str, masking: str) -> None:
    with pytest.raises(ValidationError, match=r"masking|lanes"):
        spec_of(NOWHERE, input={"packing": packing}, masking={"kind": masking})
