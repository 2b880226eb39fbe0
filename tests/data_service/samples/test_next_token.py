"""Next-token prediction on the host: the text as it is, and every token that follows another of its text a target."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.rng import stream_key
from data_service.samples.make import make_rows
from data_service.samples.masking import MlmMasking
from data_service.samples.next_token import NextToken
from data_service.samples.packing import RowCuts, pack_block
from data_service.samples.samples import Samples
from data_service.samples.spec import Masking, SourceSpec, StreamSpec
from data_service.types import Block
from tests.support.data.corpora import NEVER_MASKED, SPECIAL, random_block, spec_of, targets_per_row

SOURCE = SourceSpec(name="text", uri="nowhere", manifest_fingerprint="f" * 64)
PACKINGS = ["full_sentences", "doc_sentences", "contiguous"]
blocks = st.builds(random_block, seed=st.integers(0, 1000), tokens=st.integers(1, 900))


def spec_with(packing: str, masking: Masking, length: int = 64) -> StreamSpec:
    return spec_of(SOURCE, length=length, masking=masking, input={"packing": packing})


def make(block: Block, packing: str, masking: Masking, seed: str = "test") -> tuple[RowCuts, Samples]:
    spec = spec_with(packing, masking)
    rows = pack_block(block, packing, spec.length)  # type: ignore[arg-type]
    return rows, make_rows(block, rows, 0, len(rows), spec, stream_key(seed))


@given(blocks, st.sampled_from(PACKINGS))
def test_nothing_is_hidden_and_each_token_after_another_is_a_target(block: Block, packing: str) -> None:
    """Row by row: of a stretch of text between special tokens all but the first."""
    _, samples = make(block, packing, NextToken())
    special = np.isin(samples.tokens, NEVER_MASKED)
    np.testing.assert_array_equal(samples.tokens[~special], block.tokens)
    after_text = np.append(False, ~special[:-1])
    expected = np.flatnonzero(~special & after_text)
    np.testing.assert_array_equal(samples.target_positions, expected)
    np.testing.assert_array_equal(samples.target_ids, samples.tokens[expected])
    assert samples.causal is not None
    assert samples.causal.all()
    assert (samples.tokens[samples.offsets[:-1]] == SPECIAL.cls).all()


@given(blocks, st.sampled_from(PACKINGS))
def test_the_rows_are_those_of_masked_language_modelling(block: Block, packing: str) -> None:
    _, ours = make(block, packing, NextToken())
    _, masked = make(block, packing, MlmMasking())
    np.testing.assert_array_equal(ours.offsets, masked.offsets)
    original = masked.tokens.copy()
    original[masked.target_positions] = masked.target_ids
    np.testing.assert_array_equal(ours.tokens, original)
    assert masked.causal is None


@pytest.mark.parametrize("packing", PACKINGS)
def test_the_expected_number_of_targets_is_near(packing: str) -> None:
    _, samples = make(random_block(seed=3, tokens=4000), packing, NextToken())
    lengths = np.diff(samples.offsets)
    expected = sum(NextToken().expected_target_count(int(length), int(length) - 2) for length in lengths)
    found = targets_per_row(samples).sum()
    assert found <= expected
    assert found >= 0.8 * expected
