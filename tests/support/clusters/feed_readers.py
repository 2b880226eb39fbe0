"""Many ranks in few processes: real clients of a real feed, each reading its share of every step. Nobody trains."""

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import ray

from data_service.samples.spec import StreamSpec
from data_service.service.client import FeedClient
from data_service.service.feed import FeedConfig, FeedHandle, start_feed
from data_service.stream.positions import PhaseBatches, SampleRange, StepSampleRanges
from data_service.stream.stream import StepStart
from launcher.runtime.rank.data import ANNOUNCED_STEPS, RankShard

ROOT = Path(__file__).parents[3]
NODE = 8  # ranks of a machine, which pull a slab once


@dataclass(frozen=True)
class Served:
    """What a feed did for its ranks.

    Attributes:
        steps: measured, after the first `warm` of them.
        seconds: they took.
        feed_seconds: CPU seconds of the feed's process in them.
        node_bytes: that a machine pulled a step, over all steps: mean and most.
    """

    steps: int
    seconds: float
    feed_seconds: float
    node_bytes: tuple[float, float]

    def __str__(self) -> str:
        mean, most = (size / 1e6 for size in self.node_bytes)
        return (
            f"{self.steps / self.seconds:.2f} steps/s; the feed's process {1e3 * self.feed_seconds / self.steps:.1f} "
            f"CPU ms a step, so {self.steps / max(self.feed_seconds, 1e-9):.1f} steps/s of its core; a node of {NODE} "
            f"ranks pulls {mean:.3f} MB a step, at most {most:.3f} MB"
        )


class Host:
    """Some of the ranks, whole machines of them, in one process."""

    def __init__(self, feed: FeedHandle, spec: StreamSpec, ranks: range, shares: list[RankShard], steps: int) -> None:
        self._clients = [FeedClient(feed, spec) for _ in ranks]
        self._shares = shares
        batch = shares[0].rows[0] * shares[0].world
        self._positions = StepSampleRanges(
            [PhaseBatches.from_samples(steps, batch, self._clients[0].samples_per_epoch)]
        )
        self._pulled: list[dict[str, int]] = [{} for _ in range(-(-len(ranks) // NODE))]

    def read(self, steps: range) -> None:
        """As `RankData` does."""
        for step in steps:
            ranges = self._positions.ranges_of_step(step)
            for client, share in zip(self._clients, self._shares, strict=True):
                if step % (ANNOUNCED_STEPS // 2) == 0:
                    self._announce(client, share, step)
                for _, part in share.deal(ranges)[0]:
                    for r in part:
                        client.read(r.epoch, r.start, r.stop)
            if step % 4 == 0:
                self._look()

    def pulled(self) -> list[int]:
        """Bytes that came to each machine."""
        self._look()
        return [sum(pulled.values()) for pulled in self._pulled]

    def _announce(self, client: FeedClient, share: RankShard, step: int) -> None:
        coming = [
            self._positions.ranges_of_step(n) for n in range(step, min(step + ANNOUNCED_STEPS, self._positions.steps))
        ]
        mine: list[SampleRange] = [r for ranges in coming for _, part in share.deal(ranges)[0] for r in part]
        first = coming[0][0]
        batch = share.rows[0] * share.world
        client.prefetch([(r.epoch, r.start, r.stop) for r in mine], StepStart(batch, first.epoch, first.start))

    def _look(self) -> None:
        for number, client in enumerate(self._clients):
            self._pulled[number // NODE].update(client.held_bytes)


@contextmanager
def small_ray(cpus: int = 2) -> Iterator[None]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with tempfile.TemporaryDirectory(prefix="ray-") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)  # of the processes that Ray starts
        ray.init(
            num_cpus=cpus,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=str(Path(folder)),
            object_store_memory=2_000_000_000,
        )
        try:
            yield
        finally:
            ray.shutdown()


def serve(
    spec: StreamSpec, *, ranks: int, rows: int, steps: int, warm: int, processes: int, config: FeedConfig
) -> Served:
    """Let `ranks` ranks read `rows` rows of each step, on the Ray that runs."""
    feed = start_feed(config)
    shares = [RankShard(rank, ranks, (rows,)) for rank in range(ranks)]
    each = -(-ranks // processes // NODE) * NODE
    parts = [range(first, min(first + each, ranks)) for first in range(0, ranks, each)]
    actor = ray.remote(num_cpus=0)(Host)
    hosts = [actor.remote(feed, spec, part, shares[part.start : part.stop], steps) for part in parts]
    ray.get([host.read.remote(range(warm)) for host in hosts])
    process = _feed_process()
    began, busy = time.perf_counter(), sum(process.cpu_times()[:2])
    for step in range(warm, steps, 4):  # together, as ranks that train are
        ray.get([host.read.remote(range(step, min(step + 4, steps))) for host in hosts])
    seconds, busy = time.perf_counter() - began, sum(process.cpu_times()[:2]) - busy
    pulled = [size / steps for host in hosts for size in ray.get(host.pulled.remote())]
    for host in (*hosts, feed):
        ray.kill(host)
    return Served(steps - warm, seconds, busy, (sum(pulled) / len(pulled), max(pulled)))


def _feed_process() -> psutil.Process:
    (found,) = [p for p in psutil.Process().children(recursive=True) if "ray::Feed" in "".join(p.cmdline())]
    return found
