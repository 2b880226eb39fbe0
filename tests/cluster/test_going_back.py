"""A run whose loss is said to be bad, through Ray: it goes back by itself, gives up in time, and goes on when told."""

from pathlib import Path

import pytest

from checkpoints.attempt import Attempt
from checkpoints.listing import Rewind, record, rewinds
from launcher.runtime.run.record import open_run
from tests.support.ranks.run_group import finish
from tests.support.runs import small_runs
from tests.support.runs.train_command import output, training

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]

STEPS = 40
SETTINGS = (
    f"phases=[{{steps: {STEPS}, length: 32, batch: {{sequences: 12}}}}]",
    "checkpoint={every: {steps: 5}, keep_last: 3}",
    f"evaluation={{every: {{steps: {STEPS}}}, samples: 20}}",
    "zero=1",
)


def test_back_once_then_the_end_then_on_to_the_last_step(tmp_path: Path) -> None:
    """Any loss above the median is called high, so it happens twice in the first steps; then nothing is."""
    small_runs.prepare_corpus(tmp_path)
    touchy = "spikes={window: 8, threshold: 0.001, patience: 1, most_rewinds: 1}"
    uri = small_runs.new_run(tmp_path, "touchy", *SETTINGS, touchy)
    with training(uri) as process:
        assert process.wait(300) == 2, output(process)
        shown = output(process)
    assert "between" in shown, "it says what it does"
    assert " 1 times" in shown, "and why it ends"
    events = small_runs.history(uri).events
    went_back = [event for event in events if event["kind"] == "rewind"]
    assert len(went_back) == 2
    assert [event["step"] for event in events if event["kind"] == "resume"] == [went_back[0]["to"]]

    small_runs.operate(uri, "spikes.threshold=null")
    with training(uri) as process:
        assert process.wait(300) == 0, output(process)
    told = small_runs.new_run(tmp_path, "told", *SETTINGS, "spikes={threshold: null}")
    store = open_run(told).store
    skips = rewinds(open_run(uri).store)[-1].skips
    assert sum(stop - start for _, _, start, stop in skips) == sum(event["samples"] for event in went_back)
    record(
        store, Rewind(attempt=0, to=None, began=0, reached=0, cause="told", skips=skips), Attempt(store, 0)
    )
    finish(told, 2)
    assert small_runs.losses(uri) == small_runs.losses(told)
    assert small_runs.ledger(uri) == small_runs.ledger(told)
    assert small_runs.final_state(uri, STEPS) == small_runs.final_state(told, STEPS)
