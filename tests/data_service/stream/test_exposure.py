"""The samples that hold a text are found by arithmetic: the same ones that a scan of all samples finds."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_service.samples.spec import SourceSpec, Stage
from data_service.stream.exposure import TokenRange
from data_service.stream.stream import Stream
from tests.support.data.corpora import block_of_pairs, random_block, source_of, spec_of, write_corpus

SIZES = ((900, 350, 610), (420,), (300, 280))
FEW = {"samples": 24, "least_tokens": 1}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[SourceSpec, ...]:
    folder = tmp_path_factory.mktemp("sources")
    return tuple(
        source_of(
            write_corpus(folder / str(number), [random_block(7 * number + size, size) for size in its]),
            f"s{number}",
        )
        for number, its in enumerate(SIZES)
    )


@st.composite
def inputs(draw: st.DrawFn) -> dict[str, Any]:
    """Settings of rows of text, of segments in several ways, and of lanes."""
    length = draw(st.sampled_from([16, 24, 40]))
    kind = draw(st.sampled_from(["packed", "pairs", "lanes", "sentences"]))
    if kind == "packed":
        packing = draw(st.sampled_from(["full_sentences", "doc_sentences", "contiguous"]))
        stretches = draw(st.sampled_from([1, 4]))
        return {"length": length, "input": {"packing": packing}, "window": FEW | {"stretches": stretches}}
    if kind == "pairs":
        packing = draw(st.sampled_from(["segment_pair", "sentence_pair", "ordered_pair", "two_segments"]))
        copies = draw(st.integers(1, 3))
        return {"length": length, "input": {"packing": packing, "copies": copies}, "window": FEW}
    if kind == "sentences":
        return {
            "length": length,
            "input": {"packing": "sentences", "shortest": 2},
            "masking": {"kind": "none"},
            "one_source": draw(st.sampled_from([None, 3])),
            "window": FEW,
        }
    return {
        "length": 32,
        "input": {"packing": "lanes", "reuse": 16, "both_directions": draw(st.booleans())},
        "masking": {"kind": "plm", "predict": 4},
        "lanes": draw(st.sampled_from([None, 4])),
        "window": {"samples": 16, "least_tokens": 1},
    }


def scanned(stream: Stream, place: TokenRange, epochs: range) -> set[tuple[int, int]]:
    """The (epoch, sample) of each sample whose text has a token of the place: every sample is looked at."""
    uri = stream.spec.sources[place.source].uri
    held = range(place.start, place.stop)
    found = set()
    for epoch in epochs:
        for sample in range(stream.samples_per_epoch):
            text = stream.source(epoch, sample)
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
def places(draw: st.DrawFn) -> TokenRange:
    source = draw(st.integers(0, len(SIZES) - 1))
    block = draw(st.integers(0, len(SIZES[source]) - 1))
    start = draw(st.integers(0, SIZES[source][block] - 1))
    return TokenRange(source, block, start, draw(st.integers(start + 1, SIZES[source][block])))


@pytest.mark.long
@settings(deadline=None, max_examples=8)
@given(inputs(), st.lists(places(), min_size=1, max_size=3, unique=True), st.integers(0, 3), st.data())
def test_as_a_scan_of_all_samples(
    sources: tuple[SourceSpec, ...],
    given_inputs: dict[str, Any],
    wanted: list[TokenRange],
    epoch: int,
    data: st.DataObject,
) -> None:
    chosen = sources
    if "lanes" not in given_inputs and "one_source" not in given_inputs:
        weights = data.draw(st.sampled_from([None, (1.0, 2.0, 1.0), (3.0, 1.0, 1.0)]))
        pairs = zip(sources, weights or (None,) * len(sources), strict=True)
        chosen = tuple(source.model_copy(update={"weight": weight}) for source, weight in pairs)
    stream = Stream(spec_of(*chosen, **given_inputs))
    assert_found(stream, wanted, range(epoch, epoch + 2))


@pytest.mark.long
def test_a_segment_that_is_only_the_end_of_a_document_holds_no_text(sources: tuple[SourceSpec, ...]) -> None:
    """Sample 292 of epoch 3 has such a second segment, which was drawn at token 200 of the block."""
    lanes = {"packing": "lanes", "reuse": 16, "both_directions": True}
    more = {"masking": {"kind": "plm", "predict": 4}, "window": {"samples": 16, "least_tokens": 1}}
    stream = Stream(spec_of(*sources, length=32, input=lanes, **more))
    place = TokenRange(0, 2, 0, 201)
    assert range(200, 200) in stream.source(3, 292).stretches
    assert_found(stream, [place], range(2, 6))


@pytest.mark.long
def test_of_pairs(tmp_path: Path) -> None:
    uri = write_corpus(tmp_path / "pairs", [block_of_pairs(seed, 30, 2) for seed in range(3)], negatives=0)
    stream = Stream(
        spec_of(
            source_of(uri),
            length=24,
            input={"packing": "pairs"},
            masking={"kind": "none"},
            one_source=5,
            window=FEW,
        )
    )
    assert_found(stream, [TokenRange(0, 1, 30, 75), TokenRange(0, 2, 0, 4)], range(3))


@pytest.mark.long
@settings(deadline=None, max_examples=3)
@given(st.lists(places(), min_size=1, max_size=3, unique=True), st.sampled_from([1, 2, 3]))
def test_of_phases_that_read_on(sources: tuple[SourceSpec, ...], wanted: list[TokenRange], last: int) -> None:
    stages = (
        Stage(phase=0, length=16, units=40, weights=(1, 0, 1)),
        Stage(phase=1, length=32, units=700, in_tokens=True, weights=(1, 2, 0)),
        Stage(phase=2, length=24, units=60),
    )
    stream = Stream(spec_of(*sources, length=stages[last - 1].length, stages=stages[:last], window=FEW))
    assert_found(stream, wanted, range(2))


def test_a_source_of_which_nothing_is_taken(sources: tuple[SourceSpec, ...]) -> None:
    stages = (Stage(phase=0, length=16, units=40, weights=(1, 0, 1)),)
    stream = Stream(spec_of(*sources, length=16, stages=stages, window=FEW))
    assert list(stream.find([TokenRange(1, 0, 0, 420)], range(3))) == []
