"""Rows of translations: a sentence and its own, each opened and closed, cut to fit; plain text beside them."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from data_service.errors import CorpusError
from data_service.rng import stream_key
from data_service.samples.make import cut_block, make_rows
from data_service.samples.masking import MaskingTables
from data_service.samples.samples import Samples, distribute_rows, join_rows
from data_service.samples.spec import SourceSpec, StreamSpec
from data_service.types import Block
from tests.support.data.corpora import (
    NEVER_MASKED,
    SPECIAL,
    VOCABULARY,
    block_of,
    block_of_pairs,
    random_block,
    spec_of,
)

ENGLISH, FRENCH = ("en",), ("fr",)
KEY = stream_key("test")
KNOWN = ("de", "en", "fr")
NOWHERE: dict[str, Any] = {"uri": "nowhere", "manifest_fingerprint": "f" * 64}
PAIRS, TEXT = 0, 1  # sources of `translations`
WORDS = np.arange(VOCABULARY) % 3 > 0


def translations(length: int = 24, **changes: object) -> StreamSpec:
    sources = (
        SourceSpec(name="both", languages=("fr", "en"), **NOWHERE),
        SourceSpec(name="one", languages=("en",), **NOWHERE),
    )
    return spec_of(*sources, length=length, **{"input": {"packing": "translations"}, "languages": KNOWN, **changes})


def made(block: Block, spec: StreamSpec, source: int = PAIRS) -> Samples:
    rows = cut_block(block, spec, KEY, source)
    return make_rows(block, rows, 0, len(rows), spec, KEY, MaskingTables(WORDS), source=source)


def unmasked(samples: Samples) -> list[list[int]]:
    tokens = samples.tokens.copy()
    tokens[samples.target_positions] = samples.target_ids
    return [tokens[first:last].tolist() for first, last in itertools.pairwise(samples.offsets.tolist())]


def literally_cut(one: list[int], other: list[int], room: int) -> tuple[list[int], list[int]]:
    """Token by token from the end of the longer one; of two alike, and of an odd place left, the second gives way to
    what the first needs less."""
    while len(one) + len(other) > room:
        if len(other) > room // 2:
            other = other[:-1]
        else:
            one = one[:-1]
    return one, other


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 1000), st.integers(0, 2), st.integers(8, 40))
def test_a_row_is_a_sentence_and_its_translation(seed: int, negatives: int, length: int) -> None:
    block = block_of_pairs(seed, 9, 2 + negatives)
    samples = made(block, translations(length))
    rows, starts = unmasked(samples), samples.segment_starts
    assert starts is not None
    assert len(rows) == 9
    for number, (row, start) in enumerate(zip(rows, starts.tolist(), strict=True)):
        first = block.documents[number]
        texts = [block.tokens[block.sentences[at] : block.sentences[at + 1]].tolist() for at in (first, first + 1)]
        one, other = row[1 : start - 1], row[start + 1 : -1]
        assert row == [SPECIAL.cls, *one, SPECIAL.sep, SPECIAL.cls, *other, SPECIAL.sep]
        assert len(row) <= length
        assert one == texts[0][: len(one)]
        assert other == texts[1][: len(other)]
        if sum(map(len, texts)) > length - 4:
            assert len(row) == length, "no place is left empty"
            assert (one, other) == literally_cut(texts[0], texts[1], length - 4)
        else:
            assert (one, other) == tuple(texts)
    assert samples.restarts is not None
    assert samples.restarts.all()
    assert samples.languages is not None
    assert samples.languages.tolist() == [[2, 1]] * 9


def test_targets_lie_in_both_sentences_and_on_no_special_token() -> None:
    samples = made(block_of_pairs(3, 400, 2, mean=20), translations(64))
    assert samples.segment_starts is not None
    assert not np.isin(samples.target_ids, NEVER_MASKED).any()
    row = np.searchsorted(samples.offsets, samples.target_positions, side="right") - 1
    second = samples.target_positions - samples.offsets[row] >= samples.segment_starts[row]
    assert 0.4 < second.mean() < 0.6
    text = len(samples.tokens) - 4 * samples.rows
    assert len(samples.target_ids) / text == pytest.approx(0.15, abs=0.01)


def test_text_beside_translations_is_packed_as_it_is_alone() -> None:
    block, spec = random_block(5, 900), translations()
    samples = made(block, spec, TEXT)
    alone = made(block, spec_of(spec.sources[TEXT], length=24, input={"packing": "contiguous"}))
    np.testing.assert_array_equal(samples.tokens, alone.tokens)
    np.testing.assert_array_equal(samples.target_positions, alone.target_positions)
    assert samples.segment_starts is not None
    np.testing.assert_array_equal(samples.segment_starts, np.diff(samples.offsets))
    assert samples.restarts is not None
    assert not samples.restarts.any()
    assert samples.languages is not None
    assert (samples.languages == 1).all()
    assert alone.languages is None
    assert alone.segment_starts is None
    assert alone.restarts is None
    together = join_rows([samples, made(block_of_pairs(1, 4, 2), spec)])
    order = np.random.default_rng(0).permutation(together.rows)
    (dealt,) = distribute_rows(together, [order])
    for column in ("languages", "restarts", "segment_starts"):
        np.testing.assert_array_equal(getattr(dealt, column), getattr(together, column)[order])


def test_languages_of_a_plain_stream() -> None:
    spec = spec_of(SourceSpec(name="t", languages=FRENCH, **NOWHERE), languages=("en", "fr"))
    samples = made(random_block(5, 300), spec)
    assert samples.languages is not None
    assert (samples.languages == 1).all()
    assert samples.segment_starts is None


def test_examples_of_one_text_are_no_translations() -> None:
    with pytest.raises(CorpusError, match=r"\b2 texts\b"):
        made(block_of([[4, 4], [4]]), translations())


@pytest.mark.parametrize("languages", [(), ("es",)])
def test_a_model_with_languages_needs_those_of_every_source(languages: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError, match=r"\bt\b.*\blanguages\b.*\ben, fr\b"):
        spec_of(SourceSpec(name="t", languages=languages, **NOWHERE), languages=("en", "fr"))


def test_specs_without_languages_are_written_as_before() -> None:
    plain = spec_of(SourceSpec(name="t", **NOWHERE))
    assert "languages" not in plain.model_dump_json()
    told = spec_of(SourceSpec(name="t", languages=ENGLISH, **NOWHERE))
    assert StreamSpec.model_validate_json(told.model_dump_json()) == told
    assert told.fingerprint != plain.fingerprint
