"""What a save costs training: the copy, the commit, and steps beside an upload, over a line of limited speed.

The last save of a run waits for its upload: that is the synchronous save to which the others are compared.

`infra/test -m long tests/bench/test_save_stall.py -rP` prints the figures.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from launcher.runtime.run.step_table import Record
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs
from tests.support.stores.fault_proxy import FaultProxy
from tests.support.stores.s3 import S3Server

pytestmark = [pytest.mark.cluster, pytest.mark.rgw, pytest.mark.long, pytest.mark.timeout(1200)]

BYTES_PER_SECOND = 40e6
EVERY, STEPS = 40, 160
SETTINGS = (
    "model.layers=4",
    "model.hidden=512",
    "model.heads=8",
    "model.feed_forward=2048",
    f"phases=[{{steps: {STEPS}, length: 32, batch: {{sequences: 12}}}}]",
    f"checkpoint={{every: {{steps: {EVERY}}}, keep_last: 3}}",
    f"evaluation={{every: {{steps: {STEPS}}}, samples: 20}}",
)


def test_training_hardly_waits_for_a_save(rgw: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = f"s3://{rgw.new_bucket()}"
    small_runs.prepare_corpus(tmp_path, root)
    run = small_runs.new_run(root, "run", *SETTINGS)
    with FaultProxy(rgw.endpoint) as proxy:
        proxy.bytes_per_second = BYTES_PER_SECOND
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        finish(run, 1, timeout=900)
        history = small_runs.history(run)
    *beside, last = (event for event in history.events if event["kind"] == "commit")
    assert [event["step"] for event in beside] == [40, 80, 120]
    synchronous, blocked = last["blocked"], [event["blocked"] for event in beside]
    assert synchronous > 0.9 * last["bytes"] / BYTES_PER_SECOND, "the line was the limit"
    slower = slow_down(history.steps, beside)
    print(
        f"{last['bytes'] / 1e6:.0f} MB at {BYTES_PER_SECOND / 1e6:.0f} MB/s: {synchronous:.2f} s when waited for; "
        f"beside training {', '.join(f'{1000 * seconds:.0f} ms' for seconds in blocked)} of waiting, "
        f"{max(blocked) / synchronous:.1%} at most; steps meanwhile take {slower:.2f} times as long"
    )
    assert max(blocked) < 0.05 * synchronous


def slow_down(steps: Iterable[Record], saves: list[Record]) -> float:
    """Median time of a step while a save is under way, over that of the others."""
    seconds = np.array([step["seconds"] for step in steps])
    beside = np.zeros(len(seconds), bool)
    for save in saves:
        elapsed = np.cumsum(seconds[save["step"] :])
        beside[save["step"] :] |= elapsed < save["seconds"]
    assert beside.any()
    return float(np.median(seconds[beside]) / np.median(seconds[~beside]))
