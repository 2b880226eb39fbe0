"""A node that builds windows dies with all it holds; the reader gets every sample all the same."""

from pathlib import Path

import numpy as np
import pytest
import ray
from ray.cluster_utils import Cluster

from data_service.samples.spec import WindowSize
from data_service.service.client import FeedClient
from data_service.service.feed import FeedConfig, start_feed
from data_service.stream.stream import Stream
from tests.support.data.corpora import random_block, source_of, spec_of, write_corpus

pytestmark = pytest.mark.cluster


@pytest.mark.long
def test_a_data_node_dies(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    uri = write_corpus(tmp_path / "corpus", [random_block(seed, 60_000) for seed in range(10)])
    spec = spec_of(source_of(uri), window=WindowSize(least_tokens=100_000))
    reference = Stream(spec)
    memory = {"object_store_memory": 200_000_000}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "temp_dir": str(tmp_path_factory.mktemp("r")), **memory},
    )
    try:
        doomed = cluster.add_node(num_cpus=2, **memory)
        ray.init(address=cluster.address, log_to_driver=False)
        feed = start_feed(FeedConfig(workers=3, memory=20_000_000))
        client = FeedClient(feed, spec)
        count = client.samples_per_epoch
        ranges = [
            (epoch, start, min(start + 400, count)) for epoch in (0, 1) for start in range(0, count, 400)
        ]
        client.prefetch(iter(ranges))
        for number, (epoch, start, stop) in enumerate(ranges):
            if number == 3:
                cluster.add_node(num_cpus=2, **memory)
                cluster.remove_node(doomed, allow_graceful=False)
            ours, theirs = client.read(epoch, start, stop), reference.read(epoch, start, stop)
            np.testing.assert_array_equal(ours.tokens, theirs.tokens)
            np.testing.assert_array_equal(ours.target_positions, theirs.target_positions)
        client.close()
    finally:
        ray.shutdown()
        cluster.shutdown()
