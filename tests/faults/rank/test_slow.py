"""A rank that is slow holds up all; it is named, though every rank's steps take equally long."""

from pathlib import Path

import pytest

from tests.support.ranks.run_group import run_group
from tests.support.runs import small_runs

pytestmark = [pytest.mark.cluster, pytest.mark.long]

SETTINGS = (
    "phases=[{steps: 80, length: 32, batch: {sequences: 12}}]",
    "checkpoint={every: {steps: 20}, keep_last: 2}",
    "evaluation={every: {steps: 80}, samples: 4}",
    "stragglers={window: 6, ratio: 1.8}",
)


def test_the_slow_rank_is_named(tmp_path: Path) -> None:
    """Stopped for three quarters of the time, by signals; three microbatches, one for each rank."""
    small_runs.prepare_corpus(tmp_path)
    run = small_runs.new_run(tmp_path, "slow", *SETTINGS)
    ended = run_group(run, 3, slow=2)
    assert ended.codes == [0, 0, 0], ended.output
    found = small_runs.events(run, "straggler")
    assert found, ended.output
    assert {event["rank"] for event in found} == {2}
    assert found[0]["doing"] == "compute"
    assert found[0]["ratio"] >= 1.8
    assert found[0]["step"] >= 20, "nobody was slow before"
    assert found[0]["host"]
    assert "rank 2 on" in ended.output
