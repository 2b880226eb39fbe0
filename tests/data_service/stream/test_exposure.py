"""The samples that hold a text are found by arithmetic: the same ones that a scan of all samples finds."""

from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.errors import PlanError
from data_service.stream.exposure import TokenRange
from data_service.stream.sources import Corpora
from data_service.stream.stream import Stream
from tests.support.data.corpora import spec_of
from tests.support.data.row_settings import Sources, opened, streams, write_sources


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    return write_sources(tmp_path_factory.mktemp("sources"))


def scanned(stream: Stream, place: TokenRange, epochs: range) -> set[tuple[int, int]]:
    """The (epoch, sample) of each sample whose text has a token of the place: every sample is looked at."""
    uri = stream.spec.sources[place.source].uri
    held = range(place.start, place.stop)
    found = set()
    for epoch in epochs:
        for sample in range(stream.samples_per_epoch):
            text = stream.sample_text(epoch, sample)
            if (text.uri, text.block) == (uri, place.block) and any(
                max(part.start, held.start) < min(part.stop, held.stop) for part in text.stretches
            ):
                found.add((epoch, sample))
    return found


def assert_found(stream: Stream, places: list[TokenRange], epochs: range) -> None:
    found = list(stream.find(places, epochs))
    assert len(found) == len(set(found))
    for place in places:
        mine = {(epoch, sample) for other, epoch, sample in found if other == place}
        assert mine == scanned(stream, place, epochs)


@st.composite
def places(draw: st.DrawFn, stream: Stream) -> TokenRange:
    tables = Corpora(stream.spec).tables
    source = draw(st.integers(0, len(tables) - 1))
    block = draw(st.integers(0, len(tables[source]) - 1))
    size = int(tables[source].tokens[block])
    start = draw(st.integers(0, size - 1))
    return TokenRange(source, block, start, draw(st.integers(start + 1, size)))


@pytest.mark.long
@settings(deadline=None, max_examples=12)
@given(streams(), st.integers(0, 3), st.data())
def test_as_a_scan_of_all_samples(sources: Sources, drawn: dict[str, Any], epoch: int, data: st.DataObject) -> None:
    try:
        stream = opened(sources, drawn)
    except PlanError:  # fewer rows than lanes or a batch
        return
    wanted = data.draw(st.lists(places(stream), min_size=1, max_size=3, unique=True))
    assert_found(stream, wanted, range(epoch, epoch + 2))


@pytest.mark.long
def test_a_segment_that_is_only_the_end_of_a_document_holds_no_text(sources: Sources) -> None:
    """Lanes draw such second segments, and name the token of the block at which they were drawn."""
    lanes = {"packing": "lanes", "reuse": 16, "both_directions": True}
    more = {"masking": {"kind": "plm", "predict": 4}, "window": {"samples": 16, "least_tokens": 1}}
    stream = Stream(spec_of(*sources["text"], length=32, input=lanes, **more))
    found = (
        (epoch, stream.plan.origin_of_sample(epoch, sample), part.start)
        for epoch in count()
        for sample in range(stream.samples_per_epoch)
        for part in stream.sample_text(epoch, sample).stretches
        if not part
    )
    epoch, origin, start = next(found)
    assert_found(stream, [TokenRange(origin.source, origin.block, 0, start + 1)], range(epoch, epoch + 2))
