"""`tests/bench/average.py` measures weights, averages and means where it says."""

from pathlib import Path

import average
import pytest

from launcher.app.cli.demo_path import write_jsonl


def test_means_are_of_checkpoints_evenly_in_the_decay() -> None:
    plan = average.Plan(steps=100, decay=20, rows=4, count=5)
    assert plan.checkpoints(100) == {84, 88, 92, 96, 100}
    assert plan.checkpoints(80) == {64, 68, 72, 76, 80}


@pytest.mark.long
def test_a_small_bench_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "text.jsonl")
    average.main(
        [str(tmp_path / "text.jsonl")],
        tmp_path / "out",
        steps=40,
        decay=10,
        rows=4,
        count=2,
        seeds=2,
        vocabulary=400,
    )
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 2 * (2 + len(average.DECAYS))
    losses = [line.split(" | ")[2:4] for line in rows[1:]]
    assert len({loss for pair in losses for loss in pair}) > len(losses), "seeds and weights differ"
