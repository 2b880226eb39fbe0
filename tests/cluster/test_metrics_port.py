"""What a real Ray's agent shows to Prometheus. Needs `ray[default]` (`maskfleet[cluster]`), as on a cluster."""

import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from data_service.service.feed import FeedConfig, start_feed
from data_service.service.gauges import GAUGE_DESCRIPTIONS as SERVICE
from data_service.store.open import open_store
from launcher.runtime.cluster.display import GAUGE_DESCRIPTIONS, Gauges
from launcher.runtime.run.log import evaluation_record
from tests.support.data.corpora import random_block, source_of, spec_of, write_corpus
from tests.support.runs.untrained import step_record

pytestmark = pytest.mark.cluster
for _needed in ("opencensus", "aiohttp_cors", "prometheus_client"):
    pytest.importorskip(_needed, reason="Ray exports metrics only with ray[default]: maskfleet[cluster]")

PATIENCE_S = 120.0  # processes report every ten seconds


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the agent's page. Where operators find it without choosing a port: in `ray.nodes()`."""
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        _temp_dir=str(tmp_path_factory.mktemp("r")),
        object_store_memory=100_000_000,
        log_to_driver=False,
    )
    (node,) = ray.nodes()
    yield f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    ray.shutdown()


def test_every_gauge_is_on_the_metrics_port(port: str, tmp_path: Path) -> None:
    uri = open_store(tmp_path / "run").uri
    gauges = Gauges(uri)  # the driver's
    gauges.count_start(1)
    gauges.record(step_record(6, attempt=1) | {"mfu": 0.5})
    gauges.record(evaluation_record(7, {"loss": 9.0, "mlm_loss": 2.0, "rtd_loss": 0.3}))
    spec = spec_of(source_of(write_corpus(tmp_path, [random_block(seed, 20_000) for seed in range(4)])))
    feed = start_feed(FeedConfig(workers=1, memory=1 << 28))
    ray.get(feed.open.remote(spec.model_dump_json()))
    ray.get(feed.windows.remote(spec.model_dump_json(), [(0, 0)], []))

    wanted = {f"ray_maskfleet_{name}" for name in (*GAUGE_DESCRIPTIONS, *SERVICE)}
    page = await_names(port, wanted)
    run = f'run="{uri}"'
    (step,) = (line for line in page if line.startswith("ray_maskfleet_step{"))
    assert run in step
    assert float(step.split()[-1]) == 7
    losses = {line.split()[-1]: line for line in page if line.startswith("ray_maskfleet_heldout_loss{")}
    assert 'term="mlm"' in losses["2.0"]
    assert 'term="rtd"' in losses["0.3"]


def await_names(port: str, wanted: set[str]) -> list[str]:
    """The page's lines, once every name is there."""
    deadline, tick = time.monotonic() + PATIENCE_S, 0.5
    while True:
        with urllib.request.urlopen(port, timeout=10) as answer:
            lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
        missing = wanted - {line.partition("{")[0] for line in lines}
        if not missing:
            return lines
        assert time.monotonic() < deadline, missing
        time.sleep(tick)  # there is nothing to wait on: Ray's processes report when they do
