"""From the SIGKILL of a rank to the end of the next training step: how long, and where the time goes.

`infra/test -m long tests/bench/test_recovery.py -rP` prints the median of a few deaths by part, with layers compiled
and without, side by side.
"""

import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from launcher.runtime.run.history import read_history
from launcher.runtime.run.record import open_run
from tests.support.runs import small_runs
from tests.support.runs.train_command import (
    await_commit,
    committed,
    kill_everything,
    output,
    titled,
    training,
    wait_for,
)

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(3600)]

DEATHS = 5
SLOWEST_S = 13.2  # Ray Train alone, with a rank that loads a model and trains, on a machine like this one
SETTINGS = (
    "phases=[{steps: 100000, length: 32, batch: {sequences: 48}}]",
    "checkpoint={every: {steps: 20}, keep_last: 3}",
    "evaluation={every: {steps: 100000}, samples: 20}",
    "zero=2",
    "trainers=2",
)


def test_a_killed_rank_is_back_soon(tmp_path: Path) -> None:
    small_runs.prepare_corpus(tmp_path, documents=300)
    found = {choice: deaths(tmp_path, f"compile={choice}") for choice in ("false", "true")}
    print(f"{'':<12}{'Python':>26}{'compiled':>28}")
    for part in found["true"][0]:
        print(f"{part:<12}" + "  ".join(spelt([one[part] for one in found[choice]]) for choice in found))
    totals = {choice: [sum(one.values()) for one in found[choice]] for choice in found}
    print(f"{'in all':<12}" + "  ".join(spelt(totals[choice]) for choice in found))
    assert statistics.median(totals["false"]) < SLOWEST_S


def deaths(folder: Path, setting: str) -> list[dict[str, float]]:
    """Where the time went after each of them."""
    uri = small_runs.new_run(folder, setting, *SETTINGS, setting)
    with training(uri, environment={"HOME": str(folder)}) as process:  # compiled code is kept there
        wait_for(process, lambda: committed(uri) > 0, timeout=1800)
        killed = []
        for number in range(1, DEATHS + 1):
            await_commit(process, uri)
            titled(process, "ray::RankProcess.run")[0].kill()
            killed.append(time.time())
            wait_for(process, lambda: len(kinds(uri, "underway")) > number)  # noqa: B023  # called here only
        assert process.poll() is None, output(process)
        kill_everything(process)
    compiled = [event["compiled"] for event in kinds(uri, "compilation")]
    assert compiled == [True] * (DEATHS + 1) * (setting == "compile=true")
    return [
        breakdown(at, death, underway)
        for at, death, underway in zip(killed, kinds(uri, "death"), kinds(uri, "underway")[1:], strict=True)
    ]


def spelt(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):6.2f} s ({min(seconds):5.2f} to {max(seconds):5.2f})"


def kinds(uri: str, kind: str) -> list[Mapping[str, object]]:
    return [event for event in read_history(open_run(uri).store).events if event["kind"] == kind]


def breakdown(killed: float, death: Mapping[str, Any], underway: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by part, from `killed` to the end of the first step: the driver's, then the new rank's."""
    rank = underway["seconds"]
    began = underway["time"] - sum(rank.values())
    processes = began - death["time"]  # places for them, and their start
    return {"noticed": death["time"] - killed, "processes": processes, **rank}
