"""The Ray service delivers the bytes of the single process, whatever its size and whatever dies."""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

from data_service.errors import CorpusError, CorruptBlock
from data_service.samples.spec import StreamSpec
from data_service.service.client import FeedClient
from data_service.service.feed import FeedConfig, FeedHandle, start_feed
from data_service.service.tasks import is_worker_death
from data_service.store.errors import Truncated
from data_service.store.open import open_store
from data_service.stream.positions import PhaseBatches, SampleRange, StepSampleRanges
from data_service.stream.stream import StepStart, Stream
from data_service.tokenizers.load import save_tokenizer
from launcher.runtime.rank.data import cut_ranges
from tests.support.data.corpora import assert_same, block_of_pairs, random_block, source_of, spec_of, write_corpus
from tests.support.data.raw_text import small_tokenizer

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("alone")]

Ranges = list[tuple[int, int, int]]


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    blocks = [random_block(seed, 20_000) for seed in range(12)]
    return write_corpus(tmp_path_factory.mktemp("corpus"), blocks, [random_block(99, 3000)])


@pytest.fixture(scope="module")
def spec(uri: str) -> StreamSpec:
    return spec_of(source_of(uri), window={"least_tokens": 30_000})


def steps_of(spec: StreamSpec, steps: int, batch: int, count: int) -> list[Ranges]:
    positions = StepSampleRanges([PhaseBatches.from_samples(steps, batch, count)])
    return [[(r.epoch, r.start, r.stop) for r in positions.ranges_of_step(step)] for step in range(steps)]


def cut_rows(step: Ranges, first: int, rows: int) -> Ranges:
    """Rows `first` to `first + rows` of a step."""
    parts = cut_ranges([SampleRange(0, *range_) for range_ in step], first, rows)
    return [(r.epoch, r.start, r.stop) for r in parts]


@contextmanager
def connected(feed: FeedHandle, spec: StreamSpec) -> Iterator[FeedClient]:
    client = FeedClient(feed, spec)
    try:
        yield client
    finally:
        client.close()


def read_all(client: FeedClient, reference: Stream, steps: list[Ranges]) -> None:
    client.prefetch(range_ for step in steps for range_ in step)
    for step in steps:
        for range_ in step:
            assert_same(client.read(*range_), reference.read(*range_))


def kill_one(title: str) -> bool:
    """Kill a process of this cluster that runs `title` just now (Ray says so in its command line), if there is one."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            command = process.cmdline()
            if command and f"ray::{title}" in command[0]:
                process.kill()
                return True
    return False


PLENTY, ONE_SLAB = 10_000_000, 1 << 21


def ensure_same_bytes(spec: StreamSpec, steps: int, batch: int, **config: Any) -> None:
    """A client of a feed reads what this process computes."""
    reference, feed = Stream(spec), start_feed(FeedConfig(**config))
    with connected(feed, spec) as client:
        assert client.samples_per_epoch == reference.samples_per_epoch
        read_all(client, reference, steps_of(spec, steps, batch, client.samples_per_epoch))
    ray.kill(feed)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("memory", [1, PLENTY])
@pytest.mark.parametrize("slab_tokens", [2000, ONE_SLAB])
def test_same_bytes_at_any_size(spec: StreamSpec, workers: int, memory: int, slab_tokens: int) -> None:
    ensure_same_bytes(spec, 30, 640, workers=workers, memory=memory, slab_tokens=slab_tokens)


@pytest.mark.long
@pytest.mark.parametrize("packing", ["segment_pair", "two_segments"])
def test_pairs_by_the_service(uri: str, packing: str, tmp_path: Path) -> None:
    settings = {"window": {"least_tokens": 30_000}, "input": {"packing": packing, "copies": 2}}
    spec, cache = spec_of(source_of(uri), **settings), str(tmp_path / "cache")
    ensure_same_bytes(spec, 20, 1500, workers=2, memory=PLENTY, slab_tokens=3000, cache=cache)


def test_lanes_by_the_service(uri: str) -> None:
    save_tokenizer(small_tokenizer(), f"{uri}/tokenizer")
    spec = spec_of(
        source_of(uri),
        window={"samples": 200, "least_tokens": 1},
        input={"packing": "lanes", "reuse": 16},
        masking={"kind": "plm", "predict": 6},
        length=40,
        lanes=12,
    )
    ensure_same_bytes(spec, 40, 12, workers=2, memory=PLENTY, slab_tokens=3000)


@pytest.mark.long
def test_ranks_come_and_go_whatever_steps_they_announce(spec: StreamSpec) -> None:
    """Worlds of other sizes read on in the windows of those before, and even disagree on how steps lie."""
    reference, draws = Stream(spec), random.Random(11)
    feed = start_feed(FeedConfig(workers=2, memory=10_000_000, slab_tokens=1000))
    batch, count = 240, reference.samples_per_epoch
    steps = steps_of(spec, 48, batch, count)
    for first in range(0, 48, 8):
        world = draws.choice([1, 2, 3, 5])
        share = -(-batch // world)
        with ExitStack() as clients:
            ranks = [clients.enter_context(connected(feed, spec)) for _ in range(world)]
            parts = [[cut_rows(step, rank * share, share) for step in steps[first:]] for rank in range(world)]
            for client, part in zip(ranks, parts, strict=True):
                hint = StepStart(draws.choice([batch, batch, 100]), 0, draws.choice([0, 0, 17]))
                client.prefetch([r for step in part for r in step], draws.choice([hint, None]))
            for number in range(8):
                for client, part in zip(ranks, parts, strict=True):
                    for range_ in part[number]:
                        assert_same(client.read(*range_), reference.read(*range_))
            if draws.random() < 0.5:
                assert kill_one("Feed")
    ray.kill(feed)


@pytest.mark.long
def test_reading_without_announcing_and_backwards(spec: StreamSpec) -> None:
    reference = Stream(spec)
    feed = start_feed(FeedConfig(workers=1, memory=1))
    with connected(feed, spec) as client:
        for epoch, start, stop in [(5, 3000, 3100), (0, 0, 50), (5, 2000, 3000), (1, 10, 4000)]:
            assert_same(client.read(epoch, start, stop), reference.read(epoch, start, stop))
        assert client.wait_seconds > 0
    ray.kill(feed)


@pytest.mark.long
def test_killed_workers_and_a_killed_feed_change_nothing(spec: StreamSpec) -> None:
    """kill -9 of processes that build windows, and of the feed, again and again while a rank reads."""
    reference = Stream(spec)
    feed = start_feed(FeedConfig(workers=2, memory=200_000, slab_tokens=3000))
    killed = {"_build_slabs": 0, "Feed": 0}
    with connected(feed, spec) as client:
        steps = steps_of(spec, 2000, 500, client.samples_per_epoch)
        client.prefetch(range_ for step in steps for range_ in step)
        for number, step in enumerate(steps):
            for range_ in step:
                assert_same(client.read(*range_), reference.read(*range_))
            title = "Feed" if number % 20 == 19 and killed["Feed"] < 3 else "_build_slabs"
            killed[title] += kill_one(title)
            if killed["Feed"] >= 3 and killed["_build_slabs"] >= 3:
                break
    assert killed["Feed"] >= 3
    assert killed["_build_slabs"] >= 3
    ray.kill(feed)


@pytest.mark.long
def test_batches_of_tokens_by_the_service(spec: StreamSpec, tmp_path: Path) -> None:
    reference = Stream(spec)
    feed = start_feed(FeedConfig(workers=2, memory=10_000_000, cache=str(tmp_path / "cache")))
    with connected(feed, spec) as client:
        ours, theirs = client.token_axis(), reference.token_axis()
        positions = range(0, 900_000, 77_777)
        assert [ours.sample_at_unit(unit) for unit in positions] == [theirs.sample_at_unit(unit) for unit in positions]
        first, second = (ray.get(feed.token_axis.remote(spec.model_dump_json()))[0] for _ in range(2))
        assert first == second, "one object, which ranks of a node share"
        assert kill_one("Feed")
        again = client.token_axis()
        assert [again.sample_at_unit(unit) for unit in positions] == [theirs.sample_at_unit(unit) for unit in positions]
    kinds = {entry.key.split("/")[0] for entry in open_store(tmp_path / "cache").list()}
    assert kinds == {"rows", "lengths"}
    ray.kill(feed)


@pytest.mark.long
def test_a_damaged_block_reaches_the_reader_as_itself_and_at_once(tmp_path: Path) -> None:
    uri = write_corpus(tmp_path / "c", [random_block(seed, 5000) for seed in range(6)])
    spec = spec_of(source_of(uri), input={"packing": "contiguous"})
    feed = start_feed(FeedConfig(workers=1, memory=10_000_000))
    with connected(feed, spec) as client:
        client.read(0, 0, 1)
        shard = tmp_path / "c" / "train" / "000000.tar"
        good = shard.read_bytes()
        shard.write_bytes(good[:20_000] + bytes(len(good) - 20_000))
        began = time.monotonic()
        with pytest.raises(CorruptBlock, match=r"train/000000\.tar, block \d"):
            client.read(1, 0, client.samples_per_epoch)
        assert time.monotonic() - began < 30
        shard.write_bytes(good)
        assert client.read(1, 0, client.samples_per_epoch).rows == client.samples_per_epoch
    ray.kill(feed)


def test_a_failed_prefetch_is_raised_by_the_read_that_needs_it(tmp_path: Path) -> None:
    uri = write_corpus(tmp_path / "c", [random_block(seed, 5000) for seed in range(6)])
    spec = spec_of(source_of(uri), input={"packing": "contiguous"}, window={"least_tokens": 5000})
    feed = start_feed(FeedConfig(workers=1, memory=10_000_000))
    (tmp_path / "c" / "train" / "000000.tar").write_bytes(b"")
    with connected(feed, spec) as client:
        client.prefetch([(0, 0, client.samples_per_epoch)])
        with pytest.raises(Truncated, match=r"000000\.tar"):
            client.read(0, 0, 10)
    ray.kill(feed)


def test_a_corpus_that_is_not_there_reaches_whoever_opens_it(uri: str) -> None:
    feed = start_feed(FeedConfig(workers=1, memory=1))
    missing = spec_of(source_of(uri).model_copy(update={"uri": uri + "-gone"}))
    with pytest.raises(CorpusError, match=r"manifest\.json"):
        FeedClient(feed, missing)
    ray.kill(feed)


@pytest.mark.long
def test_a_client_is_told_of_a_long_count(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The feed answers how far its pass is while the pass is under way."""
    monkeypatch.setattr("data_service.service.client._POLL_INTERVAL_S", 0.01)
    spec = spec_of(source_of(uri), window={"least_tokens": 30_000}, length=23)
    told: list[int] = []
    feed = start_feed(FeedConfig(workers=2, memory=10_000_000, cache=str(tmp_path / "cache")))
    client = FeedClient(feed, spec, told.append)
    client.close()
    assert told == sorted(told)
    assert ray.get(feed.progress.remote()) == 12
    assert told  # while it waited


@pytest.mark.long
@pytest.mark.parametrize("slab_tokens", [500, 1 << 21], ids=["slabs", "one-slab"])
def test_batches_of_examples_are_of_one_source_for_every_rank(tmp_path: Path, slab_tokens: int) -> None:
    """Pairs of two corpora, read as three ranks read their microbatches, over an epoch's end."""
    sources = []
    for name, first, blocks in (("a", 0, 5), ("b", 50, 3)):
        made = [block_of_pairs(seed, 60, 3) for seed in range(first, first + blocks)]
        sources.append(source_of(write_corpus(tmp_path / name, made, negatives=1), name))
    texts = {"input": {"packing": "pairs", "negatives": 1}, "masking": {"kind": "none"}}
    window = {"samples": 48, "least_tokens": 1, "stretches": 16}
    spec = spec_of(*sources, length=12, window=window, one_source=12, temperature=2.0, **texts)
    reference = Stream(spec, windows=8)
    steps = steps_of(spec, reference.samples_per_epoch // 12 + 6, 12, reference.samples_per_epoch)
    feed = start_feed(FeedConfig(workers=2, memory=1_000_000, slab_tokens=slab_tokens))
    for rank in range(3):
        mine = [cut_rows(step, 4 * rank, 4) for step in steps]
        with connected(feed, spec) as client:
            client.prefetch((range_ for step in mine for range_ in step), StepStart(12, 0, 0))
            for step in mine:
                for range_ in step:
                    assert_same(client.read(*range_), reference.read(*range_))
    for step in steps:
        assert len({reference.sample_text(epoch, n).name for epoch, a, b in step for n in range(a, b)}) == 1


@ray.remote(max_retries=0)
def fails(error: Exception) -> None:
    raise error


@pytest.mark.parametrize(("error", "dead"), [(MemoryError(), True), (ValueError("no"), False)])
def test_a_task_without_memory_has_died(error: Exception, dead: bool) -> None:
    with pytest.raises(ray.exceptions.RayTaskError) as raised:
        ray.get(fails.remote(error))
    assert is_worker_death(raised.value) is dead
