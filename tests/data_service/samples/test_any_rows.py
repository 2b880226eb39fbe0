"""Whatever rows are made of: any range of a block's rows has the same bytes alone as among others; packed rows hold all
the text. Any spec comes back from JSON."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.rng import stream_key
from data_service.samples.make import cut_block, make_rows
from data_service.samples.samples import slice_rows
from data_service.samples.spec import StreamSpec
from tests.support.data.corpora import NEVER_MASKED, SPECIAL, assert_same, originals
from tests.support.data.row_settings import KEY, PACKED, any_rows, block_for, spec_with, tables_for


@settings(deadline=None)
@given(any_rows(), st.integers(0, 999), st.integers(100, 900), st.data())
def test_rows_alone_are_the_rows_among_others(
    drawn: dict[str, Any], seed: int, tokens: int, data: st.DataObject
) -> None:
    block, spec, key = block_for(drawn, seed, tokens), spec_with(drawn), stream_key("rows", seed)
    assert StreamSpec.model_validate_json(spec.model_dump_json()) == spec
    rows, tables = cut_block(block, spec, stream_key("cut", seed)), tables_for(spec)
    if not len(rows):
        return
    whole = make_rows(block, rows, 0, len(rows), spec, key, tables)
    start = data.draw(st.integers(0, len(rows) - 1))
    stop = data.draw(st.integers(start + 1, len(rows)))
    assert_same(make_rows(block, rows, start, stop, spec, key, tables), slice_rows(whole, start, stop))


@settings(deadline=None)
@given(any_rows(), st.integers(0, 999), st.integers(1, 900), st.sampled_from([10**6, 7, 3, 1]))
def test_the_text_is_all_there_and_nothing_special_is_a_target(
    drawn: dict[str, Any], seed: int, tokens: int, unknown: int
) -> None:
    """Some blocks have unknown pieces, which are never masked; a few hold nothing else."""
    block, spec = block_for(drawn, seed, max(tokens, 20)), spec_with(drawn)
    block.tokens[::unknown] = SPECIAL.unk
    rows = cut_block(block, spec, KEY)
    if not len(rows):
        return
    samples = make_rows(block, rows, 0, len(rows), spec, KEY, tables_for(spec))
    text = originals(samples)
    special = np.isin(text, NEVER_MASKED)
    assert (np.diff(samples.target_positions) > 0).all()
    assert not np.isin(samples.target_ids, SPECIAL.unk).any()
    assert spec.masking.kind == "denoise" or not special[samples.target_positions].any()
    if drawn["input"]["packing"] in PACKED:
        ordinary = block.tokens[block.tokens != SPECIAL.unk]
        np.testing.assert_array_equal(text[~special], ordinary)
        assert (text == SPECIAL.unk).sum() == len(block.tokens) - len(ordinary)
        assert (text[samples.offsets[:-1]] == SPECIAL.cls).all()
        assert (text[samples.offsets[1:] - 1] == SPECIAL.sep).all()
