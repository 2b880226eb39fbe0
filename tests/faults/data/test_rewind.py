"""Losses gone bad in real runs: no update, then back and on without that data, as if it had never been there.

The data itself is bad, at chosen places: rows at which the model computes NaN, and rows whose targets are noise, which
it trains on. Two ranks without Ray, which start again by themselves when a run goes back.
"""

import re
from pathlib import Path

import pytest

from checkpoints.attempt import Attempt
from checkpoints.gather import SingleRank
from checkpoints.listing import Rewind, checkpoint_rows, read_rewinds, record_rewind
from checkpoints.verify import find_newest_good
from launcher.observe.inspect.show import find_sample
from launcher.runtime.run.record import open_run
from tests.support.ranks.run_group import KILLED, finish, run_group
from tests.support.runs import small_runs

pytestmark = pytest.mark.cluster

ROWS = 12  # in a step
STEPS, BATCH = 40, "batch: {sequences: 12}"
SETTINGS = (
    f"phases=[{{steps: {STEPS}, length: 32, {BATCH}}}]",
    "checkpoint={every: {steps: 3}, keep_last: 1}",
    f"evaluation={{every: {{steps: {STEPS}}}, samples: 20}}",
    "spikes={window: 8, threshold: 3.0, patience: 6, most_rewinds: 2}",
    "optimizer.adamw.lr=4e-3",
    "zero=2",
)
CORPUS = {"documents": 1200, "block_tokens": 2048}


def of_steps(*stretches: tuple[int, int]) -> list[tuple[int, int]]:
    """The samples that steps `start` to `stop` take in a run that leaves nothing out."""
    return [(ROWS * start, ROWS * stop) for start, stop in stretches]


DEADLY = of_steps((10, 11), (17, 23))  # once, which is only skipped; and as often in a row as is too much
WRONG = of_steps((39, 45))  # taken by steps 39 - n, when n steps' data have been left out before


@pytest.mark.long
def test_the_run_is_the_one_that_was_told_from_the_start_to_leave_that_data_out(folder: Path) -> None:
    """Stopped after the first spike, and killed in the midst of the second, of which there is a checkpoint then."""
    run = small_runs.new_run(folder, "disturbed", *SETTINGS)
    finish(run, 2, wrong=WRONG, deadly=DEADLY, stop_at=24)
    (first,) = small_runs.events(run, "rewind")
    assert (first["began"], first["step"], first["reason"]) == (17, 23, "losses that are not finite")
    assert first["to"] <= 17 - 6
    assert [event["step"] for event in small_runs.events(run, "skipped_step")] == [10, *range(17, 23)]

    began = 39 - (23 - first["to"])
    killed = run_group(run, 2, wrong=WRONG, deadly=DEADLY, kill={0: began + 6, 1: began + 6})
    assert killed.codes == [KILLED, KILLED], killed.output
    inside = max(row.step for row in checkpoint_rows(open_run(run).store) if not row.abandoned)
    assert inside > began, "the spike had gone on for some steps when this was saved"

    finish(run, 2, wrong=WRONG, deadly=DEADLY)
    _, second = small_runs.events(run, "rewind")
    assert (second["began"], second["step"]) == (began, began + 6)
    assert second["to"] <= began - 6
    assert re.search(r"losses of \d", second["reason"])
    resumed = [event["step"] for event in small_runs.events(run, "resume")]
    assert resumed == [first["to"], 24, inside, second["to"]]

    told = small_runs.new_run(folder, "told", *SETTINGS)
    _tell(told, run)
    finish(told, 2, wrong=WRONG, deadly=DEADLY)
    assert small_runs.events(told, "rewind") == []
    small_runs.ensure_same(run, told, STEPS)
    states = [find_newest_good(open_run(uri).store, SingleRank()) for uri in (run, told)]
    assert states[0] is not None
    assert states[1] is not None
    assert states[0].manifest.state == states[1].manifest.state, "what is remembered of the losses included"
    nothing_lost_unsaid(run)


def _tell(told: str, run: str) -> None:
    """What `run` left out is left out of `told` before its first step."""
    store = open_run(told).store
    skips = read_rewinds(open_run(run).store)[-1].skips
    record_rewind(store, Rewind(attempt=0, to=None, began=0, reached=0, cause="told", skips=skips), Attempt(store, 0))


def nothing_lost_unsaid(run: str) -> None:
    """Every sample up to the last was trained on, or the record says that it was left out; none is both."""
    skipped = [span[1:] for event in small_runs.events(run, "rewind") for span in event["skipped"]]
    spans = [*small_runs.ledger(run), *skipped]
    everything = sorted((epoch, sample) for epoch, start, stop in spans for sample in range(start, stop))
    assert len(everything) == len(set(everything))
    assert [epoch for epoch, _ in everything] == [0] * len(everything)
    assert [sample for _, sample in everything] == list(range(len(everything)))
    opened = open_run(run)
    shown = find_sample(opened, STEPS - 1, 0)
    assert (shown.epoch, shown.sample) == small_runs.ledger(run)[-1][:2], "the tool knows of it, too"


SHORT = (
    f"phases=[{{steps: 24, length: 32, {BATCH}}}]",
    "evaluation={every: {steps: 24}, samples: 20}",
    "checkpoint={every: {steps: 4}, keep_last: 3}",
    "optimizer.adamw.lr=4e-3",
)


@pytest.mark.long
def test_an_outlier_leaves_the_weights_alone_as_what_is_not_finite_does(folder: Path) -> None:
    """The same steps make no update in two runs: in one they have noise for targets, in the other a broken model."""
    noise = small_runs.new_run(folder, "noise", *SHORT, "spikes={window: 8, outlier: 2.0}")
    finish(noise, 1, wrong=of_steps((16, 17), (20, 21)))
    skipped = [event["step"] for event in small_runs.events(noise, "skipped_step")]
    assert {16, 20} <= set(skipped)
    assert all("outlier" in event["reason"] for event in small_runs.events(noise, "skipped_step"))
    broken = small_runs.new_run(folder, "broken", *SHORT)
    finish(broken, 1, deadly=of_steps(*((step, step + 1) for step in skipped)))
    assert [event["step"] for event in small_runs.events(broken, "skipped_step")] == skipped
    assert small_runs.final_state(noise, 24) == small_runs.final_state(broken, 24)


@pytest.mark.long
def test_it_ends_with_the_reason_and_the_same_command_goes_on_from_before(folder: Path) -> None:
    run = small_runs.new_run(folder, "hopeless", *SHORT, "spikes={patience: 5, most_rewinds: 0}")
    deadly = of_steps((12, 17))
    refused = run_group(run, 1, deadly=deadly)
    assert refused.codes == [1]
    assert re.search(r"\bfinite, .*\bstep 12 .*\b0 times\b", refused.output)
    assert "step 4" in " ".join(refused.output.lower().split())
    finish(run, 1, deadly=deadly)
    assert [event["step"] for event in small_runs.events(run, "resume")] == [4]
    assert [record["step"] for record in small_runs.history(run).steps] == list(range(24))


@pytest.mark.long
def test_before_there_is_a_checkpoint_it_just_ends(folder: Path) -> None:
    run = small_runs.new_run(folder, "early", *SHORT, "spikes={patience: 5}")
    ended = run_group(run, 1, deadly=of_steps((3, 30)))
    assert ended.codes == [1]
    assert " 5 " in ended.output
    assert small_runs.events(run, "rewind") == []
