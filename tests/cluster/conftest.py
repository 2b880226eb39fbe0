"""Ray for the tests of a file: alone on this machine, or as a cluster of nodes. It is imported by what uses it, since
pure tests import this file, too."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

STORE_BYTES = 150_000_000
QUICK_HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 1000,
    "health_check_failure_threshold": 3,
}


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A Ray of three cores that this process has started."""
    from tests.support.clusters.feed_readers import small_ray

    with small_ray(3):
        yield


@pytest.fixture
def head(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator["Cluster"]:
    """A head without places, which finds soon that a node is gone. Commands find it; tests add nodes."""
    from ray.cluster_utils import Cluster

    arguments = {
        "num_cpus": 0,
        "temp_dir": str(tmp_path_factory.mktemp("r")),
        "object_store_memory": STORE_BYTES,
        "_system_config": QUICK_HEALTH_CHECKS,
    }
    cluster = Cluster(initialize_head=True, head_node_args=arguments)
    try:
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        yield cluster
    finally:
        cluster.shutdown()
