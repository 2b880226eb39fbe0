"""Phases that read on, over real corpora: the same bytes from whichever step one starts, and no text twice."""

from collections import defaultdict

import numpy as np
import pytest

from data_service.samples.spec import SourceSpec, Stage
from data_service.stream.positions import PhaseBatches, Positions, SampleAxis
from data_service.stream.stream import Stream
from tests.support.data.corpora import assert_same, random_block, source_of, spec_of, write_corpus

PHASES = (
    Stage(phase=0, length=16, units=40, weights=(1, 0)),
    Stage(phase=1, length=32, units=700, in_tokens=True, weights=(1, 2)),
    Stage(phase=2, length=16, units=45, weights=(0, 1), most_readings=4),
    Stage(phase=3, length=24, units=30),
)
STEPS = 5  # of each


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> tuple[SourceSpec, ...]:
    folder = tmp_path_factory.mktemp("staged")
    sizes = ((400, 150, 300), (200, 170))
    return tuple(
        source_of(
            write_corpus(folder / str(number), [random_block(7 * number + size, size) for size in its]),
            f"s{number}",
        )
        for number, its in enumerate(sizes)
    )


def opened(sources: tuple[SourceSpec, ...], packing: str) -> tuple[list[Stream], Positions]:
    """A stream for each phase, as every start of a run opens them."""
    copies = {"copies": 2} if packing == "segment_pair" else {}
    streams = [
        Stream(
            spec_of(
                *sources,
                length=stage.length,
                stages=PHASES[: stage.phase + 1],
                input={"packing": packing, **copies},
                window={"samples": 20, "least_tokens": 1, "stretches": 4},
            )
        )
        for stage in PHASES
    ]
    batches = [
        PhaseBatches(
            STEPS,
            stage.units // STEPS,
            stream.samples_per_epoch,
            stream.token_axis() if stage.in_tokens else SampleAxis(stream.samples_per_epoch),
            staged=True,
        )
        for stage, stream in zip(PHASES, streams, strict=True)
    ]
    return streams, Positions(batches)


@pytest.mark.long
@pytest.mark.parametrize("packing", ["contiguous", "full_sentences", "doc_sentences", "segment_pair"])
def test_any_step_alone_is_what_it_is_in_its_turn(sources: tuple[SourceSpec, ...], packing: str) -> None:
    streams, positions = opened(sources, packing)
    in_turn = [
        [streams[r.phase].read(r.epoch, r.start, r.stop) for r in positions.ranges(step)]
        for step in range(positions.steps)
    ]
    for step in np.random.default_rng(3).permutation(positions.steps)[:6].tolist():
        again, places = opened(sources, packing)
        found = [again[r.phase].read(r.epoch, r.start, r.stop) for r in places.ranges(step)]
        for ours, theirs in zip(found, in_turn[step], strict=True):
            assert_same(ours, theirs)


@pytest.mark.parametrize("packing", ["contiguous", "full_sentences", "doc_sentences"])
def test_no_token_is_read_again_before_all_were(sources: tuple[SourceSpec, ...], packing: str) -> None:
    """But for less than a row where the length changes: that is left out once."""
    streams, positions = opened(sources, packing)
    read: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    for step in range(positions.steps):
        for r in positions.ranges(step):
            for sample in range(r.start, r.stop):
                found = streams[r.phase].source(r.epoch, sample)
                read[found.name, found.epoch] += [
                    (found.block, place) for (part,) in [found.stretches] for place in part
                ]
    for (name, epoch), places in read.items():
        assert len(set(places)) == len(places), "no token twice in one reading"
        if (name, epoch + 1) in read:
            text = {"s0": 850, "s1": 370}[name]
            assert len(places) > text - 4 * 32
    assert max(epoch for _, epoch in read) >= 2
