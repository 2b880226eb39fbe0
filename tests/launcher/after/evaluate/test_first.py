"""Cells that start after the same task share its model."""

from dataclasses import replace
from pathlib import Path

import pytest

from launcher.after.evaluate.measures import Finetuning, measures, shared_first
from launcher.after.finetune import run
from launcher.after.finetune.pretrained import LocalModel
from launcher.after.finetune.run import finetune
from launcher.after.tasks.task import Task
from tests.support.tasks.small_tasks import QUICK, description, model, task


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory: pytest.TempPathFactory) -> LocalModel:
    return model("bert", tmp_path_factory.mktemp("models"))


@pytest.fixture
def chained(tmp_path: Path) -> Task:
    task("pair_classification", tmp_path)
    first = tmp_path / "first.yaml"
    first.write_text(description("pair_classification") + "finetune: {epochs: 1, lr: 1.e-3}\n")
    asked = task("regression", tmp_path)
    after = asked.model_copy(update={"after": str(first)})
    after._root = asked.root
    return after


@pytest.mark.long
def test_two_cells_make_it_once_and_it_is_what_one_alone_would_make(
    pretrained: LocalModel, chained: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    original = run.finetune

    def counted(*arguments: object, **more: object) -> object:
        made.append(arguments[1])
        return original(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(run, "finetune", counted)  # `first_finetuned` calls it there
    (cell,) = measures([chained], ["epochs=1", "lr=1e-3", "batch=8"])
    assert isinstance(cell, Finetuning)
    place = tmp_path / "place"
    found = [cell.measure(pretrained, seed, place) for seed in (0, 1)]
    assert len(made) == 1
    alone = finetune(pretrained, chained, cell.chosen, 0)
    assert found[0].metrics == alone.metrics
    assert found[0].details["curves"] == alone.record()["curves"]


@pytest.mark.long
def test_another_checkpoint_or_setting_of_the_machine_is_another_model(
    pretrained: LocalModel, chained: Task, tmp_path: Path
) -> None:
    place, before = tmp_path / "place", {"task": "t", "finetune": {}}
    one = shared_first(pretrained, chained, QUICK, before, place)
    assert one == shared_first(pretrained, chained, QUICK.model_copy(update={"lr": 1.0}), before, place)
    two = shared_first(replace(pretrained, digest="other"), chained, QUICK, before, place)
    three = shared_first(pretrained, chained, QUICK.model_copy(update={"microbatch": 4}), before, place)
    assert len({found.folder for found in (one, two, three)}) == 3
    assert not [path for path in place.iterdir() if path.name.startswith(".")]
