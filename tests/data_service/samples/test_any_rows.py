"""Whatever rows are made of: any range of a block's rows has the same bytes alone as among others. Any spec comes back
from JSON."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.rng import stream_key
from data_service.samples.make import cut_block, make_rows
from data_service.samples.samples import slice_rows
from data_service.samples.spec import StreamSpec
from tests.support.data.corpora import assert_same
from tests.support.data.row_settings import any_rows, block_for, spec_with, tables_for


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
