"""A thousand ranks of one feed: steps a second, and what a machine pulls (`infra/test -m long <this file> -rP`)."""

import os
from pathlib import Path

import pytest
from synthetic import NEVER_MASKED, SPECIAL, VOCABULARY, write_corpus

from data_service.samples.spec import SourceSpec, StreamSpec, WindowSize
from data_service.service.feed import FeedConfig
from data_service.store.open import open_store
from tests.support.clusters.feed_readers import serve, small_ray

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]


def spec_at(folder: Path, *, blocks: int, length: int, batch: int) -> StreamSpec:
    manifest = write_corpus(open_store(folder), blocks)
    return StreamSpec(
        sources=(SourceSpec(name="r", uri=str(folder), manifest_fingerprint=manifest.fingerprint),),
        length=length,
        special=SPECIAL,
        never_masked=NEVER_MASKED,
        vocab_size=VOCABULARY,
        seed=0,
        window=WindowSize(samples=16 * batch, least_tokens=1),
    )


@pytest.mark.long
def test_a_node_pulls_its_own_part(tmp_path: Path) -> None:
    """Four machines of eight ranks: with slabs of whole steps, each would pull everything."""
    spec = spec_at(tmp_path / "corpus", blocks=1, length=64, batch=32 * 4)
    config = FeedConfig(workers=1, memory=1 << 24, slab_tokens=4096)
    with small_ray():
        served = serve(spec, ranks=32, rows=4, steps=64, warm=16, processes=1, config=config)
    whole = 32 * 4 * 64 * 3.5  # bytes of a step
    assert served.node_bytes[1] < 1.3 * whole / 4


@pytest.mark.long
def test_a_thousand_ranks(tmp_path: Path) -> None:
    ranks, rows = int(os.environ.get("MASKFLEET_TEST_RANKS", "1000")), 8
    spec = spec_at(tmp_path / "corpus", blocks=136, length=512, batch=ranks * rows)
    with small_ray():
        served = serve(
            spec,
            ranks=ranks,
            rows=rows,
            steps=64,
            warm=16,
            processes=4,
            config=FeedConfig(workers=2, memory=1 << 30),
        )
    print(f"{ranks} ranks, steps of {ranks * rows} rows of {spec.length}: {served}")
    whole = ranks * rows * spec.length * 3.5  # bytes of a step, at least
    assert served.node_bytes[1] < whole / 20
