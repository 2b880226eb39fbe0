"""`maskfleet diagnose`, and what the report shows of evaluated commits."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from launcher.after.diagnose.evaluate import evaluate_commit
from launcher.errors import OptionError
from launcher.observe.inspect.report.evaluations import evaluations_html, select_on_lineage
from launcher.observe.inspect.report.page import write_report
from launcher.runtime.run.evaluations import evaluated_commits
from launcher.runtime.run.history import read_history
from launcher.runtime.run.log import RunLog, record_operator_event
from launcher.runtime.run.record import open_run
from tests.support.checks.command import maskfleet
from tests.support.models.exports import FAMILIES, export
from tests.support.runs.small_runs import new_run
from tests.support.runs.untrained import Committing
from tests.support.tasks.small_tasks import Models, task_files


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal on which no heading goes on in the next line."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.long
def test_a_folder_on_text_and_tasks(tmp_path: Path) -> None:
    export(FAMILIES["electra"], tmp_path / "model")
    word, shared = task_files(str(tmp_path))
    arguments = (tmp_path / "model", "--task", word, "--task", shared, "--pooling", "mean")
    records = [json.loads(line) for line in maskfleet("diagnose", *arguments, "--json").splitlines()]
    assert {record["task"] for record in records} == {"word", "shared"}
    keys = {"task", "measure", "value", "layer", "pooling", "length", "source"}
    assert all(set(record) == keys for record in records)
    assert {record["layer"] for record in records if record["measure"] == "spearman"} == {0, 1, 2}
    shown = maskfleet("diagnose", *arguments)
    assert "Spearman" in shown
    assert "best accuracy" in shown


def test_without_a_task_the_option_is_named(models: Models) -> None:
    with pytest.raises(OptionError, match="--task"):
        maskfleet("diagnose", models("bert").folder)


@pytest.mark.long
def test_a_run_and_its_report(inputs: Path, tmp_path: Path) -> None:
    tasks = "evaluation={every: {steps: 7}, samples: 20, tasks: [heldout]}"
    uri = new_run(inputs, str(tmp_path / "run"), tasks)
    committing = Committing(uri)
    run = open_run(uri)
    assert "commits" not in page(uri, tmp_path)
    for step in (3, 6):
        evaluate_commit(run, committing.commit(step), run.recipe.evaluation.tasks)
    record_operator_event(run.store, "evaluation_failed", 1.0, step=6, what="probe <sst2>", reason="no file")
    shown = page(uri, tmp_path)
    for text in ("Evaluation of commits", "32 tokens", "probe &lt;sst2&gt;"):
        assert text in shown
    records = [json.loads(line) for line in maskfleet("diagnose", uri, "--limit", 20, "--json").splitlines()]
    assert {record["task"] for record in records} == {"heldout"}

    later = Committing(uri)
    journal = RunLog(run.store, later.attempt.number, 1000.0)
    journal.event("resume", 2.0, step=3)
    assert journal.close(30)
    found, events = evaluated_commits(run.store), read_history(run.store).events
    assert [one.commit.step for one in found] == [3, 6]
    assert [one.commit.step for one in select_on_lineage(found, events)] == [3], "what came after step 3 is done anew"
    assert "up to step 3" in evaluations_html(found, events)


def page(uri: str, folder: Path) -> str:
    write_report(open_run(uri), folder / "page.html", with_baselines=False, now=datetime.now(UTC))
    return (folder / "page.html").read_text()
