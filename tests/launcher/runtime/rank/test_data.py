"""A rank announces the rows that it will read, and how all ranks' steps lie."""

from collections.abc import Iterable
from contextlib import closing

import pytest
import torch

from data_service.stream.positions import PhaseBatches, SampleRange, StepSampleRanges
from data_service.stream.stream import StepStart, Stream
from launcher.runtime.rank.data import ANNOUNCED_STEPS, RankData, RankShard
from tests.support.data.corpora import random_block, source_of, spec_of, write_corpus

STEPS, MICROBATCH = 150, 4


class Told(Stream):
    """A stream that keeps what it was told would be read."""

    def prefetch(self, ranges: Iterable[tuple[int, int, int]], steps: StepStart | None = None) -> None:
        self.ranges, self.steps = list(ranges), steps

    def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    blocks = [random_block(seed, 3000) for seed in range(3)]
    return write_corpus(tmp_path_factory.mktemp("c") / "c", blocks, blocks[:1])


def told(uri: str, rank: int, world: int, phase: PhaseBatches, skips: list[SampleRange]) -> Told:
    """What rank `rank` has announced at its first step."""
    stream = Told(spec_of(source_of(uri)))
    positions = StepSampleRanges([phase], skips)
    share = RankShard(rank, world, (MICROBATCH,))
    data = RankData([stream], positions, {"": ([stream], 4)}, share, torch.device("cpu"), lambda batch: {"mlm": 1})
    with closing(data):
        data.fetch(0)
    return stream


@pytest.mark.parametrize("world", [1, 3])
def test_each_phase_has_a_microbatch_of_its_own(uri: str, world: int) -> None:
    streams = [Told(spec_of(source_of(uri))) for _ in range(3)]
    count = streams[0].samples_per_epoch
    positions = StepSampleRanges([PhaseBatches.from_samples(2, 8, count)] * 2, [])
    found = dict[int, list[int]]()
    for rank in range(world):
        share, device = RankShard(rank, world, (4, 3)), torch.device("cpu")
        data = RankData(
            streams[:2],
            positions,
            {"": ([streams[2]] * 2, 7), "before_": ([streams[2]] * 2, 2)},
            share,
            device,
            lambda batch: {"mlm": 1},
        )
        with closing(data):
            for step in range(4):
                work = data.fetch(step).work
                assert work.total == data.microbatch_count(step)
                for part in work.microbatches:
                    assert part.batch.numbers is not None
                    assert part.batch.numbers[0] == part.index * data.microbatch_rows(step)
                    found.setdefault(step, []).append(len(part.batch.cu_seqlens) - 1)
            for at, prefix in ((-1, ""), (-2, "before_")):
                heldout = [len(part.batch.cu_seqlens) - 1 for part in data.heldout_microbatches(4)[prefix]]
                found.setdefault(at, []).extend(rows for rows in heldout if rows)
    assert {step: sorted(rows) for step, rows in found.items()} == {
        0: [4, 4],
        1: [4, 4],
        2: [2, 3, 3],
        3: [2, 3, 3],
        -1: [1, 3, 3],
        -2: [2],
    }


@pytest.mark.long
@pytest.mark.parametrize("batch", ["samples", "tokens"])
@pytest.mark.parametrize("world", [1, 3, 8])
def test_ranks_together_announce_every_row_once(uri: str, world: int, batch: str) -> None:
    stream = Stream(spec_of(source_of(uri)))
    count = stream.samples_per_epoch
    phase = PhaseBatches.from_samples(STEPS, 20, count)
    if batch == "tokens":
        phase = PhaseBatches(STEPS, 20 * 25, count, stream.token_axis())
    skips = [SampleRange(0, 0, 57, 93)]
    expected = [r for step in range(ANNOUNCED_STEPS) for r in StepSampleRanges([phase], skips).ranges_of_step(step)]
    ranks = [told(uri, rank, world, phase, skips) for rank in range(world)]
    found = [(e, n) for rank in ranks for e, start, stop in rank.ranges for n in range(start, stop)]
    assert sorted(found) == sorted((r.epoch, n) for r in expected for n in range(r.start, r.stop))
    assert len({rank.steps for rank in ranks}) == 1, "all lay their windows alike"
    rows = sum(r.stop - r.start for r in expected)
    assert ranks[0].steps == StepStart(round(rows / ANNOUNCED_STEPS), 0, 0)
