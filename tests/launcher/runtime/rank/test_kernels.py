"""The trial of kernels at a run's start, on a CPU that plays a GPU: what is wrong is left out, and the run goes on."""

import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.ranks.bad_kernels import GPU, Misbehaviour, drawn
from tests.support.ranks.run_group import finish, run_group
from tests.support.runs import small_runs

pytestmark = pytest.mark.cluster

SETTINGS = ("model.attention_dropout=0.1", "deterministic=true")
EXACT = 1e-5  # nats


@pytest.fixture(scope="module")
def undisturbed(folder: Path) -> str:
    return finish(small_runs.new_run(folder, "without-trial", *SETTINGS), 2)


def ensure_goes_on(run: str, undisturbed: str) -> dict[str, Any]:
    """The losses are those of a run without a trial; the one event."""
    apart = np.subtract(small_runs.losses(run), small_runs.losses(undisturbed))
    assert np.abs(apart).max() <= EXACT
    (event,) = small_runs.events(run, "kernels")
    assert event["gpu"] == GPU
    return event


@pytest.mark.parametrize("how", ["wrong", pytest.param("broken", marks=pytest.mark.long)])
def test_a_kernel_that_is_wrong_is_left_out_and_the_run_goes_on(folder: Path, undisturbed: str, how: str) -> None:
    run = small_runs.new_run(folder, f"{how}-kernel", *SETTINGS)
    ended = run_group(run, 2, kernel=how, stop_at=6)
    assert ended.codes == [0, 0], ended.output
    if how == "broken":  # nor is a record that was cut short the end of the run
        (verdict,) = Path(run, "kernels").iterdir()
        verdict.write_bytes(verdict.read_bytes()[:-20])
    finish(run, 2, kernel=how)  # what was found is not tried again
    event = ensure_goes_on(run, undisturbed)
    assert "blocked" not in event["dropped"]
    assert event["dropped"][0] == "padded"
    out = {one["kernel"]: one for one in event["left_out"] if one["dropped"]}
    assert out.keys() == {"blocked"}
    if how == "wrong":
        assert out["blocked"]["error"] > 100 * out["blocked"]["bound"]
        assert re.search(r"the kernel `blocked` with dropout: its results are", ended.output)
    else:
        assert out["blocked"]["failure"].startswith("RuntimeError: ")


@pytest.mark.long
def test_right_kernels_stay_the_usual_ones(folder: Path, undisturbed: str) -> None:
    run = finish(small_runs.new_run(folder, "right-kernels", *SETTINGS), 2, kernel="right")
    event = ensure_goes_on(run, undisturbed)
    assert event["dropped"][0] == "blocked"
    assert event["plain"][0] == "padded"
    assert event["left_out"] == []
    assert small_runs.digests(run) == small_runs.digests(undisturbed)


@pytest.mark.long
def test_a_kernel_that_ends_its_process_is_left_out_at_the_first_start(folder: Path, undisturbed: str) -> None:
    event = ensure_goes_on(
        finish(small_runs.new_run(folder, "deadly-kernel", *SETTINGS), 2, kernel="deadly"), undisturbed
    )
    assert {one["kernel"] for one in event["left_out"]} == {"blocked"}
    assert all("SIGKILL" in one["failure"] for one in event["left_out"])
    assert event["dropped"][0] == "padded"


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=pytest.mark.long) for seed in range(9)])
def test_a_run_goes_on_whatever_a_kernel_does(folder: Path, undisturbed: str, seed: int) -> None:
    how = drawn(random.Random(seed))
    event = ensure_goes_on(finish(small_runs.new_run(folder, f"drawn-{seed}", *SETTINGS), 2, kernel=how), undisturbed)
    assert {one["kernel"] for one in event["left_out"]} == {"blocked"}
    assert not event["ended"]


@pytest.mark.long
def test_a_kernel_that_hangs_costs_half_of_what_the_watchdog_permits(folder: Path, undisturbed: str) -> None:
    run = small_runs.new_run(folder, "hanging-kernel", *SETTINGS, "watchdog.other=40")
    event = ensure_goes_on(finish(run, 2, kernel=Misbehaviour("blocked", "hang", "busy")), undisturbed)
    assert {one["kernel"] for one in event["left_out"]} == {"blocked"}
    assert event["ended"]
