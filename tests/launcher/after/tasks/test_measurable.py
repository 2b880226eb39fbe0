"""Tasks that a recipe's evaluation names are refused before anything is trained if they cannot be measured."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_service.store.errors import StoreUnavailable
from launcher.after.tasks.measurable import check_tasks
from launcher.after.tasks.task import bundled_tasks
from launcher.errors import RecipeError
from launcher.runtime.recipe.parts import EvaluationTask
from tests.support.checks.command import exit_code
from tests.support.tasks.small_tasks import task_files

NAMES = sorted(bundled_tasks())


def probe(**settings: object) -> EvaluationTask:
    return EvaluationTask.model_validate({"probe": settings})


def similarity(**settings: object) -> EvaluationTask:
    return EvaluationTask.model_validate({"similarity": settings})


@given(st.sampled_from(NAMES), st.integers(0, 20), st.sampled_from("abcxyz-_"))
def test_a_mistyped_name_is_refused_with_its_place(name: str, place: int, letter: str) -> None:
    mistyped = name[:place] + letter + name[place:]
    tasks = [EvaluationTask.model_validate({"heldout": {}}), probe(task=mistyped)]
    if mistyped in NAMES:
        return
    with pytest.raises(RecipeError, match=r"evaluation\.tasks\.1\.probe\.task: ") as caught:
        check_tasks(tasks, with_files=False)
    assert "tasks: " in caught.value.remedy


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path) -> None:
    tasks = [
        probe(task="sst-2"),
        similarity(task="sst2"),
        probe(task="stsb"),
        similarity(task=str(tmp_path / "mine.yaml")),
    ]
    with pytest.raises(RecipeError) as caught:
        check_tasks(tasks)
    expected = (
        r"evaluation\.tasks\.0\.probe\.task: .*'sst-2'",
        r"evaluation\.tasks\.1\.similarity\.task: sst2\b.*\bscore\b",
        r"evaluation\.tasks\.2\.probe\.task: stsb\b.*\bregression\b",
        rf"evaluation\.tasks\.3\.similarity\.task: .* {tmp_path / 'mine.yaml'}",
    )
    for line, pattern in zip(caught.value.problem.splitlines(), expected, strict=True):
        assert re.match(pattern, line)
    assert " sst2?" in caught.value.remedy


def test_files_have_to_be_there(tmp_path: Path) -> None:
    word, shared = task_files(str(tmp_path))
    check_tasks([probe(task=word), similarity(task=shared), EvaluationTask.model_validate({"heldout": {}})])
    with pytest.raises(RecipeError, match=r"evaluation\.tasks\.0\.probe\.data: .*SST-2/train\.tsv\b"):
        check_tasks([probe(task="sst2", data=str(tmp_path))])
    with pytest.raises(RecipeError, match=r"0\.similarity\.data: .*\bstsb\b"):
        check_tasks([similarity(task="stsb")])


def test_a_store_that_does_not_answer_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.setenv("MASKFLEET_STORE_PATIENCE_S", "0.1")
    with pytest.raises(StoreUnavailable):
        check_tasks([probe(task="sst2", data="s3://bucket/glue")])


@pytest.mark.parametrize("command", ["init", "train", "recipe check"])
def test_commands_that_read_a_recipe_refuse_it(
    command: str, inputs: Path, fresh_run: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = {
        "init": ["roberta-base", str(tmp_path / "new"), "--tiny", "--corpus", f"{inputs}/corpus"],
        "train": [fresh_run],
        "recipe check": ["roberta-base"],
    }[command]
    assert exit_code(*command.split(), *words, "--set", "evaluation.tasks=[{probe: {task: sst-2}}]") == 2
    assert "evaluation.tasks.0.probe.task: " in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "new").exists()
