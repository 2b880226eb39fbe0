"""What copies of the state in memory cost: the time of a step without them, as often as is cheap, and after every step.

`infra/test -m long tests/bench/test_memory_copies.py -rP` prints medians of runs that took turns. Times are of a quiet
machine.
"""

import statistics
from pathlib import Path

import pytest

from launcher.runtime.run.step_table import Record
from tests.support.runs import small_runs
from tests.support.runs.train_command import output, training

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800)]

STEPS, FIRST, TURNS = 60, 10, 3
LAYERS, HIDDEN = 4, 384
SETTINGS = (
    f"model.layers={LAYERS}",
    f"model.hidden={HIDDEN}",
    "model.heads=6",
    f"model.feed_forward={4 * HIDDEN}",
    f"phases=[{{steps: {STEPS}, length: 64, batch: {{sequences: 32}}}}]",
    "microbatch=16",
    "checkpoint={every: {steps: 1000}, keep_last: 1}",
    "evaluation={every: {steps: 1000}, samples: 20}",
    "zero=2",
    "trainers=2",
    "compile=false",
)
CHOICES = ("never", "auto", "1")


def test_copies_hardly_slow_a_step_down(tmp_path: Path) -> None:
    small_runs.prepare_corpus(tmp_path, documents=300)
    found: dict[str, list[float]] = {choice: [] for choice in CHOICES}
    for turn in range(TURNS):
        for choice in CHOICES:
            records = steps(tmp_path, f"{choice}-{turn}", choice)
            found[choice].append(statistics.median(float(record["seconds"]) for record in records))
            told(choice, records)
    for choice, seconds in found.items():
        ratios = [one / base for one, base in zip(seconds, found["never"], strict=True)]
        print(
            f"{choice:>6}: {statistics.median(seconds) * 1000:7.1f} ms, {statistics.median(ratios):.3f} of without"
        )
    auto = [one / base for one, base in zip(found["auto"], found["never"], strict=True)]
    assert statistics.median(auto) < 1.02


def told(choice: str, records: list[Record]) -> None:
    """Print what the copies took."""
    made = [record for record in records if record.get("copy_bytes")]
    waited = sum(float(record["copy_seconds"]) for record in made)
    if made:
        each, size = waited / len(made) * 1000, max(int(record["copy_bytes"]) for record in made) / 1e6
        share = waited / sum(float(record["seconds"]) for record in records)
        print(
            f"{choice:>6}: {len(made)} copies in {len(records)} steps, each {each:.1f} ms and {size:.1f} MB; "
            f"{share:.2%} of the time"
        )


def steps(folder: Path, name: str, choice: str) -> list[Record]:
    """The records of a run's steps, without the first ones."""
    uri = small_runs.new_run(folder, name, *SETTINGS, f"recovery={{spares: 0, memory_every: {choice}}}")
    with training(uri) as process:
        assert process.wait(600) == 0, output(process)
    return list(small_runs.history(uri).steps)[FIRST:]
