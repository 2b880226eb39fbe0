"""The samples that hold a text are found by arithmetic: the same ones that a scan of all samples finds."""

import random
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.errors import PlanError
from data_service.stream.exposure import TokenRange
from data_service.stream.plan import StreamPlan, Window
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


SETTINGS: tuple[dict[str, Any], ...] = (
    {"input": {"packing": "full_sentences"}},
    {"input": {"packing": "ordered_pair", "copies": 2}},
    {"input": {"packing": "full_sentences"}, "one_source": 5},
    {"input": {"packing": "lanes", "reuse": 16}, "masking": {"kind": "plm", "predict": 4}, "lanes": 4},
    {"input": {"packing": "full_sentences"}, "weights": (1.0, 4.0)},
)


@pytest.mark.parametrize("seed", range(5))
def test_each_window_is_put_in_order_once_and_samples_come_in_order(
    sources: Sources, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Places by block in their order; of each place epoch by epoch, row by row of its source's line."""
    drawn = random.Random(seed)
    window = {"samples": 20, "least_tokens": 1, "stretches": drawn.choice([1, 4])}
    stream = opened(sources, {"length": 32, "window": window, **SETTINGS[seed % len(SETTINGS)]})
    tables, first = Corpora(stream.spec).tables, drawn.randint(0, 2)
    epochs = range(first, first + 2)
    blocks = [(source, block) for source, table in enumerate(tables) for block in range(len(table))]
    wanted = []
    for source, block in drawn.choices(blocks, k=5):
        start = drawn.randrange(int(tables[source].tokens[block]))
        wanted.append(TokenRange(source, block, start, start + drawn.randint(1, 99)))
    wanted = list(dict.fromkeys(wanted))
    order = list(dict.fromkeys((place.source, place.block) for place in wanted))

    def row_in_line(sample: tuple[int, int]) -> tuple[int, int]:
        it = stream.plan.origin_of_sample(*sample)
        return sample[0], stream.plan.lines[it.source].row_number_in_line(it.epoch, it.block, it.row)

    expected = [
        (place, *sample)
        for place in sorted(wanted, key=lambda place: order.index((place.source, place.block)))
        for sample in sorted(scanned(stream, place, epochs), key=row_in_line)
    ]
    looked: list[tuple[int, int]] = []
    real = StreamPlan.window

    def counted(self: StreamPlan, epoch: int, number: int) -> Window:
        looked.append((epoch, number))
        return real(self, epoch, number)

    with monkeypatch.context() as patched:
        patched.setattr(StreamPlan, "window", counted)
        found = list(stream.find(wanted, epochs))
    assert len(looked) == len(set(looked))
    assert found == expected


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
