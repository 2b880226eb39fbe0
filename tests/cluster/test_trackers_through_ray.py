"""`maskfleet train`, killed, stopped and gone back: one run in each tracker, and it says what the run did."""

from pathlib import Path

import pytest

from checkpoints.attempt import Attempt, newest_attempt_number
from checkpoints.listing import Rewind, list_committed, record_rewind
from data_service.store.open import open_store
from launcher.runtime.run.metrics import tracker_figures
from tests.support.runs import small_runs
from tests.support.runs.listeners import Values, mlflow_runs, mlflow_values, wandb_records, wandb_values
from tests.support.runs.train_command import await_commit, kill_everything, output, training

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 60
SETTINGS = (
    f"phases=[{{steps: {STEPS}, length: 32, batch: {{sequences: 12}}}}]",
    "checkpoint={every: {steps: 5}, keep_last: 3}",
    "evaluation={every: {steps: 15}, samples: 20}",
    "zero=1",
)
TOUCHY = "spikes={window: 8, threshold: 0.001, patience: 1, most_rewinds: 1}"


def committed_lineage(uri: str) -> Values:
    values: Values = {}
    history = small_runs.history(uri)
    for made in (*history.steps, *history.evaluations):
        for name, value in tracker_figures(made).items():
            values.setdefault(name, {})[made["step"]] = value
    return values


def go_back(uri: str) -> None:
    """To the oldest checkpoint that there is, from one that the trackers know."""
    store = open_store(uri)
    marks, number = list_committed(store), newest_attempt_number(store)
    back = Rewind(attempt=number, to=marks[-1], began=0, reached=marks[0].step, cause="told", skips=())
    record_rewind(store, back, Attempt(store, number))


def test_one_run_across_three_restarts_and_rewinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any loss above the median is called high at first, so the run goes back twice and ends; later it is told to."""
    small_runs.prepare_corpus(tmp_path)
    server = f"file://{tmp_path}/mlruns"
    trackers = f"wandb: {{project: p, mode: offline}}, mlflow: {{uri: '{server}'}}"
    logging = f"logging={{flush_seconds: 1, tensorboard: false, {trackers}}}"
    uri = small_runs.new_run(tmp_path, "run", *SETTINGS, logging, TOUCHY)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("HOME", str(tmp_path))  # nobody's login
    with training(uri) as process:
        assert process.wait(300) == 2, output(process)
        assert " 1 times" in output(process), "why it ends"
    small_runs.operate(uri, "spikes.threshold=null")
    with training(uri) as process:
        await_commit(process, uri)
        process.terminate()
        assert process.wait(300) == 75, output(process)
    go_back(uri)
    with training(uri) as process:
        await_commit(process, uri)
        kill_everything(process)
    with training(uri) as process:
        assert process.wait(300) == 0, output(process)

    expected = committed_lineage(uri)
    assert set(expected["train/lr"]) == set(range(STEPS))
    assert {"train/tokens_per_second", "train/mlm_loss", "heldout/mlm_loss"} <= expected.keys()
    for told in (wandb_values(tmp_path / "run"), mlflow_values(server)):
        told.pop("times_gone_back")  # whether it saw what the run went back from depends on when it looked
        assert told == expected
    described = [record.run for record in wandb_records(tmp_path / "run") if record.HasField("run")]
    assert len({run.run_id for run in described}) == 1
    assert {"rewind", "failed", "stop", "end"} <= set(described[-1].tags)
    (run,) = mlflow_runs(server)
    assert run.info.status == "FINISHED"
    assert int(run.data.tags["events.rewind"]) == 2
