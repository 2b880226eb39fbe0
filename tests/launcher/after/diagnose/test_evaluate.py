"""A commit is measured once: by whom and how often it is asked, what is deleted, damaged or missing meanwhile."""

import json
import math
import random
from pathlib import Path

import pytest
import torch

from checkpoints.layout import CheckpointName
from data_service.stream.stream import Stream
from launcher.after.diagnose.evaluate import CommitOutcome, evaluate_commit
from launcher.after.diagnose.measures import measure_heldout_loss
from launcher.after.diagnose.states import open_checkpoint
from launcher.runtime.rank.collate import to_batch
from launcher.runtime.recipe.parts import EvaluationTask, HeldOutSettings
from launcher.runtime.run.evaluations import (
    DiagnosticCell,
    DiagnosticResult,
    Figure,
    evaluated_commits,
    is_unevaluated,
    read_diagnostics,
    read_result,
    select_measure,
    write_result,
)
from launcher.runtime.run.record import Run, open_run
from launcher.runtime.run.streams import heldout_spec
from tests.support.runs.small_runs import new_run
from tests.support.runs.untrained import Committing
from tests.support.tasks.small_tasks import task_files

NAMES = ("heldout", "probe word", "similarity shared")


@pytest.fixture
def evaluated_run(inputs: Path, tmp_path: Path) -> str:
    """A run that asks for every measure."""
    word, shared = task_files(str(tmp_path))
    of_tasks = f"{{probe: {{task: '{word}'}}}}, {{similarity: {{task: '{shared}'}}}}"
    tasks = f"[heldout, {of_tasks}]"
    return new_run(inputs, str(tmp_path / "run"), f"evaluation={{every: {{steps: 7}}, samples: 20, tasks: {tasks}}}")


def evaluate(uri: str, mark: CheckpointName) -> CommitOutcome:
    run = open_run(uri)
    return evaluate_commit(run, mark, run.recipe.evaluation.tasks)


def pending(uri: str, mark: CheckpointName) -> bool:
    run = open_run(uri)
    return is_unevaluated(run.store, mark, run.recipe.evaluation.tasks)


def objects(uri: str) -> dict[str, bytes]:
    store = open_run(uri).store
    return {entry.key: store.get(entry.key) for entry in store.list("evaluations/")}


@pytest.mark.long
def test_every_measure_once_whoever_asks(evaluated_run: str) -> None:
    mark = Committing(evaluated_run).commit(3)
    assert pending(evaluated_run, mark)
    assert evaluate(evaluated_run, mark) == CommitOutcome(computed=NAMES)
    assert not pending(evaluated_run, mark)
    before = objects(evaluated_run)
    assert evaluate(evaluated_run, mark) == CommitOutcome(known=NAMES)
    again = Committing(evaluated_run).commit(3)
    assert again != mark, "another attempt with the same weights"
    assert evaluate(evaluated_run, again) == CommitOutcome(known=NAMES)
    after = objects(evaluated_run)
    assert {key: after[key] for key in before} == before
    other = Committing(evaluated_run).commit(4)
    assert evaluate(evaluated_run, other) == CommitOutcome(computed=NAMES)
    found = {
        one.commit.step: [figure for result in one.results for figure in result.figures]
        for one in evaluated_commits(open_run(evaluated_run).store)
    }
    assert set(found) == {3, 4}
    assert {figure.measure for figure in found[3]} >= {"mlm_loss", "accuracy", "spearman"}
    assert found[3] != found[4]


@pytest.mark.long
def test_other_data_under_the_same_name_is_another_result(evaluated_run: str, tmp_path: Path) -> None:
    mark = Committing(evaluated_run).commit(3)
    evaluate(evaluated_run, mark)
    (tmp_path / "test.tsv").write_text("the machine\t1\nnothing lost\t0\n")
    assert evaluate(evaluated_run, mark) == CommitOutcome(computed=("probe word",), known=(NAMES[0], NAMES[2]))


@pytest.mark.long
def test_a_commit_that_is_gone_is_no_failure(evaluated_run: str) -> None:
    committing = Committing(evaluated_run)
    marks = [committing.commit(step) for step in (3, 6, 9)]
    committing.keep_last(1)
    assert evaluate(evaluated_run, marks[0]) == CommitOutcome(gone=True)
    assert evaluate(evaluated_run, marks[2]) == CommitOutcome(computed=NAMES)


@pytest.mark.long
def test_what_one_task_lacks_does_not_hinder_the_others(evaluated_run: str, tmp_path: Path) -> None:
    mark = Committing(evaluated_run).commit(3)
    (tmp_path / "dev.tsv").unlink()
    (tmp_path / "pairs.tsv").write_text("2\tno second text\n")
    outcome = evaluate(evaluated_run, mark)
    assert outcome.computed == NAMES[:1]
    assert set(outcome.failed) == set(NAMES[1:])
    assert "dev.tsv" in outcome.failed["probe word"]
    assert "line 1" in outcome.failed["similarity shared"]
    assert pending(evaluated_run, mark)
    task_files(str(tmp_path))
    assert evaluate(evaluated_run, mark) == CommitOutcome(computed=NAMES[1:], known=NAMES[:1])


@pytest.mark.long
def test_damaged_results_are_computed_again(evaluated_run: str) -> None:
    """Any object cut short, emptied or overwritten: the same figures come back."""
    mark = Committing(evaluated_run).commit(3)
    evaluate(evaluated_run, mark)
    store, before = open_run(evaluated_run).store, objects(evaluated_run)
    draw = random.Random(3)
    hurt = draw.sample([key for key in before if "/commits/" not in key], 3)
    for key in hurt:
        store.put(key, draw.choice([b"", b"{}", before[key][: len(before[key]) // 2], b'{"cell": 1}']))
    assert pending(evaluated_run, mark)
    assert len(evaluate(evaluated_run, mark).computed) == len(hurt)
    for key, data in objects(evaluated_run).items():
        if "/commits/" not in key:
            kept, now = (json.loads(text)["content"] for text in (before[key], data))
            assert now["figures"] == kept["figures"]


def test_results_of_another_version_are_not_taken(evaluated_run: str) -> None:
    run = open_run(evaluated_run)
    task = EvaluationTask(heldout=HeldOutSettings())
    cells = [DiagnosticCell(weights="w" * 64, task=task, data="d", seed=1, version=version) for version in (1, 2)]
    assert cells[0].path != cells[1].path
    result = DiagnosticResult(cell=cells[1], figures=(Figure(measure="loss", value=float("nan")),), seconds=1.0)
    assert write_result(run.store, result)
    assert not write_result(run.store, result), "the first one stays"
    assert read_result(run.store, cells[0]) is None
    assert read_diagnostics(run.store, "w" * 64) == [result]
    assert result.figures[0].value is None, "no number that JSON has no word for"


def test_where_data_lie_decides_nothing() -> None:
    tasks = [
        EvaluationTask.model_validate({"probe": {"task": "word", "data": data}}) for data in ("here", "s3://there/x")
    ]
    assert len({DiagnosticCell(weights="w", task=task, data="d", seed=0).path for task in tasks}) == 1


def whole(run: Run) -> dict[str, float]:
    """The loss on all held-out rows at once."""
    checkpoint = open_checkpoint(run)
    stream = Stream(heldout_spec(run, checkpoint.frozen.tokenizer))
    with torch.no_grad():
        sums = checkpoint.objective(to_batch(stream.read(0, 0, stream.samples_per_epoch), torch.device("cpu")))
    return {f"{term.name}_loss": float(term.loss_sum) / term.targets for term in sums.terms}


def test_held_out_loss_is_that_of_all_rows_and_lengths_cut_the_same_text(fresh_run: str) -> None:
    Committing(fresh_run).commit(3)
    run = open_run(fresh_run)
    found = measure_heldout_loss(open_checkpoint(run), 1000)
    losses = {(figure.length, figure.source): figure.value for figure in select_measure(found, "mlm_loss")}
    assert set(losses) == {(32, None), (64, None), (None, "text")}
    assert losses[64, None] == losses[None, "text"] == pytest.approx(whole(run)["mlm_loss"], abs=1e-5)
    assert losses[32, None] != losses[64, None]
    assert math.isfinite(losses[32, None] or math.nan)
