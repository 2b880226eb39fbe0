"""Next-token prediction on the host: the text as it is, and every token that follows another of its text a target."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.samples.next_token import NextToken
from data_service.types import Block
from tests.support.data.corpora import NEVER_MASKED, SPECIAL, random_block, targets_per_row
from tests.support.data.row_settings import PACKED, packed_rows

blocks = st.builds(random_block, seed=st.integers(0, 1000), tokens=st.integers(1, 900))


@given(blocks, st.sampled_from(PACKED))
def test_nothing_is_hidden_and_each_token_after_another_is_a_target(block: Block, packing: str) -> None:
    """Row by row: of a stretch of text between special tokens all but the first."""
    _, samples = packed_rows(block, NextToken(), packing)
    special = np.isin(samples.tokens, NEVER_MASKED)
    np.testing.assert_array_equal(samples.tokens[~special], block.tokens)
    after_text = np.append(False, ~special[:-1])
    expected = np.flatnonzero(~special & after_text)
    np.testing.assert_array_equal(samples.target_positions, expected)
    np.testing.assert_array_equal(samples.target_ids, samples.tokens[expected])
    assert samples.causal is not None
    assert samples.causal.all()
    assert (samples.tokens[samples.offsets[:-1]] == SPECIAL.cls).all()


@pytest.mark.parametrize("packing", PACKED)
def test_the_expected_number_of_targets_is_near(packing: str) -> None:
    _, samples = packed_rows(random_block(seed=3, tokens=4000), NextToken(), packing)
    lengths = np.diff(samples.offsets)
    expected = sum(NextToken().expected_target_count(int(length), int(length) - 2) for length in lengths)
    found = targets_per_row(samples).sum()
    assert found <= expected
    assert found >= 0.8 * expected
