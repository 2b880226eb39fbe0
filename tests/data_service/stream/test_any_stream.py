"""Whatever a stream reads and however it mixes: sample n of epoch e is a function of its number, whichever samples are
read with it, and it is found by arithmetic alone."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.errors import PlanError
from data_service.samples.samples import join_rows, slice_rows
from data_service.stream.sources import Corpora
from data_service.stream.stream import SlabLayout, StepStart, build_window
from tests.support.data.corpora import NEVER_MASKED, assert_same, rows_of_epoch, text_of
from tests.support.data.row_settings import PACKED, SEGMENTS, Sources, opened, streams, write_sources


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return write_sources(tmp_path_factory.mktemp("corpora"))


@settings(deadline=None, max_examples=25)
@given(streams(), st.integers(0, 2), st.integers(1, 40), st.data())
def test_any_part_is_read_alone_and_in_any_slabs(
    sources: Sources, drawn: dict[str, Any], epoch: int, rows: int, data: st.DataObject
) -> None:
    try:
        stream = opened(sources, drawn)
    except PlanError:  # fewer rows than lanes or a batch
        return
    count, plan = stream.samples_per_epoch, stream.plan
    whole = stream.read(epoch, 0, count)
    start = data.draw(st.integers(0, count - 1))
    stop = data.draw(st.integers(start + 1, count))
    assert_same(opened(sources, drawn, windows=1).read(epoch, start, stop), slice_rows(whole, start, stop))
    window = data.draw(st.integers(0, plan.epoch_layout.windows - 1))
    made = plan.window(epoch, window)
    steps = data.draw(st.none() | st.builds(StepStart, st.integers(1, 30), st.integers(0, 2), st.integers(0, 40)))
    layout = SlabLayout.for_window(plan.epoch_layout, epoch, window, rows=rows, steps=steps)
    slabs = build_window(Corpora(stream.spec), made, layout)
    begin = plan.epoch_layout.window_start(window)
    parts = [slice_rows(slabs[slab], low, high) for slab, low, high in layout.iter_slab_ranges(0, layout.size)]
    assert_same(join_rows(parts), slice_rows(whole, begin, begin + made.order.size))


@settings(deadline=None, max_examples=15)
@given(streams(), st.integers(0, 2), st.data())
def test_every_sample_is_found_with_its_text_and_its_place_among_tokens(
    sources: Sources, drawn: dict[str, Any], epoch: int, data: st.DataObject
) -> None:
    try:
        stream = opened(sources, drawn)
    except PlanError:
        return
    count, axis = stream.samples_per_epoch, stream.token_axis()
    origins = [stream.plan.origin_of_sample(epoch, sample) for sample in range(count)]
    places = [(one.source, one.block, one.row, one.epoch) for one in origins]
    assert places == rows_of_epoch(stream.plan, epoch)
    assert len(set(places)) == count
    sample = data.draw(st.integers(0, count - 1))
    if drawn["input"]["packing"] in (*PACKED, *SEGMENTS):
        text = stream.sample_text(epoch, sample).tokens
        np.testing.assert_array_equal(text, text_of(stream.read(epoch, sample, sample + 1)))
        assert not np.isin(text, NEVER_MASKED).any()
    lengths = np.diff(stream.read(epoch, 0, count).offsets)
    tokens = axis.unit_of_sample(epoch, 0) + np.append(0, np.cumsum(lengths))
    assert [axis.unit_of_sample(epoch, sample) for sample in range(count + 1)] == tokens.tolist()
    assert axis.unit_of_sample(epoch + 1, 0) == tokens[-1]
    for unit, found in ((tokens[sample], sample), (tokens[sample] - 1 + (sample == 0), sample)):
        assert axis.sample_at_unit(int(unit)) == (epoch, found)
