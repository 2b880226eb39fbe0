"""A window whose builds die is built again, so many times and no more; then what to do about it is said."""

import os
import random
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import groupby
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray
from ray.exceptions import NodeDiedError, ObjectLostError

from data_service.errors import BuildFailed
from data_service.samples.spec import StreamSpec
from data_service.service.client import FeedClient
from data_service.service.feed import Feed, FeedConfig, SlabRequest, start_feed
from data_service.service.ray_internals import logs_folder
from data_service.service.tasks import MAX_DEATHS, run_pass_on_ray
from data_service.stream.counts import PassResult
from data_service.stream.sources import Corpora
from data_service.stream.stream import SlabLayout, Stream
from tests.support.data.corpora import random_block, source_of, spec_of, write_corpus

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.usefixtures("alone")]


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "c", [random_block(seed, 4000) for seed in range(3)])
    return tmp_path / "c" / "train" / "000000.tar"


@pytest.fixture
def spec(shard: Path) -> StreamSpec:
    return spec_of(source_of(str(shard.parents[1])), input={"packing": "contiguous"})


@contextmanager
def endless(shard: Path) -> Iterator[None]:
    """Reading the shard takes for ever, until its readers are killed; then it is there again."""
    good = shard.with_suffix(".good")
    shard.rename(good)
    os.mkfifo(shard)
    try:
        yield
    finally:
        good.replace(shard)


@contextmanager
def builders_killed(most: int) -> Iterator[list[int]]:
    """Whatever builds a window is killed at once, `most` times; the processes that were."""
    killed: list[int] = []
    stop = threading.Event()

    def kill() -> None:
        while not stop.wait(0.02) and len(killed) < most:
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    if process.pid not in killed and "ray::_build_slabs" in "".join(process.cmdline()):
                        process.kill()
                        killed.append(process.pid)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield killed
    finally:
        stop.set()
        thread.join()


def test_a_build_that_dies_again_and_again_is_named_with_a_remedy(spec: StreamSpec, shard: Path) -> None:
    feed = start_feed(FeedConfig(workers=1, memory=10_000_000))
    client = FeedClient(feed, spec)
    with endless(shard), builders_killed(100) as killed, pytest.raises(BuildFailed) as raised:
        client.read(1, 0, 10)
    assert re.search(r"\bwindow 0 of epoch 1\b.*\btrain\b.*\b8 processes\b", raised.value.problem)
    assert "lower data_service.workers" in raised.value.remedy
    machines, _ = (logs_folder() / name for name in re.findall(r"\blogs/(\w+\.out)\b", raised.value.remedy))
    node = ray.get_runtime_context().get_node_id()
    assert re.search(rf"\bnode id = {node}, address = ", machines.read_text())
    assert 8 <= len(killed) <= 9
    assert client.read(1, 0, 10).rows == 10, "what was cured is no longer a failure"
    client.close()
    ray.kill(feed)


def test_a_build_that_died_a_few_times_comes(spec: StreamSpec, shard: Path, caplog: pytest.LogCaptureFixture) -> None:
    reference = Stream(spec).read(0, 0, 50)
    feed = start_feed(FeedConfig(workers=1, memory=10_000_000))
    client = FeedClient(feed, spec)
    found = []
    with endless(shard), builders_killed(3) as killed:
        reader = threading.Thread(target=lambda: found.append(client.read(0, 0, 50)))
        reader.start()
        while len(killed) < 3:
            reader.join(0.01)
    with builders_killed(1):  # the fourth still waits for the pipe
        reader.join()
    assert found[0].tokens.tolist() == reference.tokens.tolist()
    assert "3 of 8 " in caplog.text
    client.close()
    ray.kill(feed)


def fates_of(drawn: random.Random, count: int) -> list[Exception]:
    """What becomes of tasks: mostly they die, as a task without memory has; some are lost with their node."""
    died, lost = MemoryError(), [ObjectLostError("0" * 40, None, ""), NodeDiedError("the machine is gone")]
    return drawn.choices([died, *lost], [12, 1, 1], k=count)


def test_only_deaths_in_a_row_end_a_pass(spec: StreamSpec, tmp_path: Path) -> None:
    drawn, ends = random.Random(2), Counter[bool]()
    for number in range(12):
        fates, tries = fates_of(drawn, drawn.randint(MAX_DEATHS, 3 * MAX_DEATHS)), tmp_path / str(number)
        tries.mkdir()

        def job(
            corpora: Corpora, source: int, start: int, stop: int, fates: list[Exception] = fates, tries: Path = tries
        ) -> PassResult:
            before = len(list(tries.iterdir()))
            if start < stop and before < len(fates):
                (tries / str(before)).touch()
                raise fates[before]
            return np.arange(start, stop, dtype=np.int64)

        rows = [len(list(row)) for died, row in groupby(fates, lambda fate: isinstance(fate, MemoryError)) if died]
        ends[max(rows) >= MAX_DEATHS] += 1
        counted: list[int] = []
        if max(rows) >= MAX_DEATHS:
            with pytest.raises(BuildFailed, match=rf"\b{MAX_DEATHS} processes\b"):
                run_pass_on_ray(job, Corpora(spec), 0, range(3), counted.append)
        else:
            assert run_pass_on_ray(job, Corpora(spec), 0, range(3), counted.append).tolist() == [0, 1, 2]
    assert min(ends[True], ends[False]) >= 3


def test_only_builds_that_die_in_a_row_are_counted(spec: StreamSpec) -> None:
    feed, drawn, row = Feed(FeedConfig(workers=1, memory=10_000_000)), random.Random(3), 0
    layout = SlabLayout.for_window(feed.open(spec.model_dump_json()).epoch_layout, 0, 0, rows=50)
    wanted = SlabRequest((0, 0), layout, (0,))
    for fate in fates_of(drawn, 60):
        build = feed.windows(spec.model_dump_json(), wanted, [])[0, 0]
        died = isinstance(fate, MemoryError)
        row = row % MAX_DEATHS + 1 if died else 0
        assert feed.forget(spec.model_dump_json(), (0, 0), build.name, MAX_DEATHS if died else 0) == row
