"""A node that builds windows dies with all it holds; the reader gets every sample all the same."""

from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster

from data_service.samples.spec import WindowSize
from data_service.service.client import FeedClient
from data_service.service.feed import FeedConfig, start_feed
from data_service.stream.stream import Stream
from tests.support.data.corpora import assert_same, random_block, source_of, spec_of, write_corpus

pytestmark = pytest.mark.cluster


@pytest.mark.long
def test_a_data_node_dies(head: Cluster, tmp_path: Path) -> None:
    uri = write_corpus(tmp_path / "corpus", [random_block(seed, 60_000) for seed in range(10)])
    spec = spec_of(source_of(uri), window=WindowSize(least_tokens=100_000))
    reference, node = Stream(spec), {"num_cpus": 2, "object_store_memory": 200_000_000}
    doomed = head.add_node(**node)
    ray.init(address=head.address, log_to_driver=False)
    try:
        client = FeedClient(start_feed(FeedConfig(workers=3, memory=20_000_000)), spec)
        starts = range(0, client.samples_per_epoch, 400)
        ranges = [(e, at, min(at + 400, client.samples_per_epoch)) for e in (0, 1) for at in starts]
        client.prefetch(iter(ranges))
        for number, range_ in enumerate(ranges):
            if number == 3:
                head.add_node(**node)
                head.remove_node(doomed, allow_graceful=False)
            assert_same(client.read(*range_), reference.read(*range_))
        client.close()
    finally:
        ray.shutdown()
